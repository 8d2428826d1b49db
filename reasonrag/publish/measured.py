"""Figures of an evaluation that are a policy's own: found by the checksum of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.storage.questions import quoted

NAMES = {
    "em": "EM",
    "f1": "F1",
    "acc": "ACC",
    "retrievals": "retrievals",
    "steps": "steps",
    "format_rate": "format rate",
    "lasj": "LasJ",
    "osr": "OSR",
    "usr": "USR",
}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's part of a report.

    Attributes:
        figures: what `metrics.json` holds.
        policy: its name there.
        verified: whether the report measured these very weights; else it was named by a person.
    """

    figures: Row
    policy: str
    verified: bool

    @property
    def metrics(self) -> list[str]:
        """Those that there are figures of, in the order of `NAMES`."""
        return [name for name in NAMES if any(of.get(name) for _, _, of in self.rows())]

    def rows(self) -> Iterator[tuple[str, str, Row]]:
        """Policy, setting and figures: of the report's baseline, its first policy, and of this one."""
        policies = self.figures["policies"]
        for name in dict.fromkeys((next(iter(policies)), self.policy)):
            for setting, of in policies[name].items():
                yield name, setting, of

    def differences(self) -> Iterator[tuple[str, str, dict[str, Row]]]:
        """Baseline, setting and this policy's paired differences by metric."""
        found: dict[tuple[str, str], dict[str, Row]] = {}
        for row in self.figures.get("differences") or ():
            if row["policy"] == self.policy and row["metric"] in NAMES:
                found.setdefault((row["baseline"], row["setting"]), {})[row["metric"]] = row
        yield from ((*key, of) for key, of in found.items())


def read_measured(report: Path, policy: Path, checksums: Sequence[str], named: str | None) -> Measured:
    """The part of `REPORT/metrics.json` that is about a policy.

    Args:
        report: the folder of an evaluation, or its `metrics.json`.
        policy: its folder.
        checksums: of its weights.
        named: its name in the report; None: the one with these weights, or a served one of the folder's name.

    Raises:
        ConfigError: no such policy, or one of other weights.
        DataError: it is no report.
    """
    file = report / "metrics.json" if report.is_dir() else report
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
        weights = {name: _weights(figures, name) for name in figures["policies"]}
        found = [name for name, checksum in weights.items() if checksum in checksums]
        served = [name for name, checksum in weights.items() if checksum is None and name == policy.resolve().name]
        names = [named] if named is not None else found or served
        measured = [Measured(figures, name, name in found) for name in names if name in weights]
        for each in measured:
            _check(each)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise DataError(
            f"{file} is no metrics.json of `reasonrag eval` ({type(error).__name__}); give its folder as --eval"
        ) from error
    known = ", ".join(map(quoted, weights))
    if named is not None and named not in weights:
        raise ConfigError(f"{file} has no policy {quoted(named)}; it has: {known}")
    if len(measured) != 1:
        raise ConfigError(f"{file}: {len(measured)} policies of these weights in it; name one as --policy: {known}")
    (one,) = measured
    if weights[one.policy] is not None and not one.verified:
        raise ConfigError(
            f"{file}: {quoted(one.policy)} was measured with weights {weights[one.policy]}, and those to publish are "
            f"{' or '.join(checksums)}; evaluate these"
        )
    return one


def _weights(figures: Row, name: str) -> str | None:
    """Checksum of the folder that a policy of the report came from; None where it was a server."""
    kind, _, model = str(figures["content"]["policies"][name]["policy"]).partition(":")
    name, at, checksum = model.rpartition("@")
    is_folder = kind in ("hf", "vllm") and at and "/" not in name and len(checksum) == 12
    return checksum if is_folder else None


def _check(measured: Measured) -> None:
    """Touch everything that the card will, so that a damaged report is refused here."""
    for _, _, of in measured.rows():
        for found in (of[name] for name in NAMES if of.get(name)):
            _ = [float(found[part]) for part in ("mean", "low", "high")]
        int(of["questions"]["scored"])
    for _, _, differing in measured.differences():
        _ = [
            float(row[part])
            for row in differing.values()
            if row["mean"] is not None
            for part in ("mean", "low", "high")
        ]
    _ = [str(name) for name in measured.figures["dataset"]]
