"""The part of an evaluation that belongs to a policy, found by the checksum of its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import quoted
from reasonrag.evaluation.tables import Table, differences_table, results_table

_SHOWN = ("em", "f1", "acc", "retrievals", "steps", "format_rate", "lasj", "osr", "usr")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's part of an evaluation."""

    metrics: Row  # the contents of `metrics.json`
    policy: str  # its name there
    verified: bool  # whether these very weights were evaluated; if not, a person named the policy

    @property
    def results(self) -> Table:
        """Means of the baseline, which is the first policy of the report, and of this policy."""
        return results_table(self.metrics, self._metric_names, self._policies)

    @property
    def differences(self) -> Table:
        """Paired differences of this policy from the baseline."""
        return differences_table(self.metrics, self._metric_names, (self.policy,))

    @property
    def _policies(self) -> tuple[str, str]:
        return next(iter(self.metrics["policies"])), self.policy

    @property
    def _metric_names(self) -> list[str]:
        settings = [setting for name in self._policies for setting in self.metrics["policies"][name].values()]
        return [metric for metric in _SHOWN if any(setting.get(metric) for setting in settings)]


def read_measured(report: Path, policy: Path, checksums: Sequence[str], named: str | None) -> Measured:
    """Return a policy's part of `REPORT/metrics.json`.

    Args:
        report: folder of an evaluation, or its `metrics.json`.
        policy: the policy's folder.
        checksums: of its weights.
        named: its name in the evaluation; None: the policy with these weights, or a served one of the folder's name.

    Raises:
        ConfigError: there is no such policy, or it has other weights.
        DataError: it is not the `metrics.json` of an evaluation.
    """
    file = report / "metrics.json" if report.is_dir() else report
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
        weights = {name: _weights(metrics, name) for name in metrics["policies"]}
        same_weights = [name for name, checksum in weights.items() if checksum in checksums]
        served = [name for name, checksum in weights.items() if checksum is None and name == policy.resolve().name]
        names = [named] if named is not None else same_weights or served
        measured = [Measured(metrics, name, name in same_weights) for name in names if name in weights]
        for candidate in measured:  # build all that the card shows, so that damaged metrics are refused here
            _ = candidate.results, candidate.differences
        _ = [str(name) for name in metrics["dataset"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise DataError(
            f"{file} is not a metrics.json of `reasonrag eval` ({type(error).__name__}); give its folder as --eval"
        ) from error
    known = ", ".join(map(quoted, weights))
    if named is not None and named not in weights:
        raise ConfigError(f"{file} has no policy {quoted(named)}; it has: {known}")
    if len(measured) != 1:
        raise ConfigError(f"{file} holds {len(measured)} policies of these weights; name one as --eval-policy: {known}")
    (one,) = measured
    if weights[one.policy] is not None and not one.verified:
        raise ConfigError(
            f"{file}: {quoted(one.policy)} was measured with weights {weights[one.policy]}, and those to publish are "
            f"{' or '.join(checksums)}; evaluate these"
        )
    return one


def _weights(metrics: Row, name: str) -> str | None:
    """Return the checksum of the folder that a policy was loaded from; None if a server answered for it."""
    kind, _, model = str(metrics["content"]["policies"][name]["policy"]).partition(":")
    name, at, checksum = model.rpartition("@")
    is_folder = kind in ("hf", "vllm") and at and "/" not in name and len(checksum) == 12
    return checksum if is_folder else None
