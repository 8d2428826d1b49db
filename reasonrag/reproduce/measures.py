"""Metrics of a comparison, read from its evaluations: means and rates over questions and seeds, and paired differences.

The value of a question is its mean over the seeds. OSR and USR are micro-averages (arXiv:2510.07794, eq. 2): over all
steps of all questions and seeds. Whole questions are resampled: an interval is about other questions, with these seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.evaluation.bootstrap import Column, Ratio, group_intervals, subtract
from reasonrag.evaluation.tables import excludes_zero

Row = dict[str, Any]
Results = dict[str, Any]
Seeds = Mapping[int, Mapping[str, Row]]  # rows by seed and question id


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a comparison.

    Attributes:
        label: in tables.
        part: the column that is averaged, or the numerator of a rate.
        whole: the denominator of a rate over steps.
        share: whether the metric lies in [0, 1], so that differences are shown in percentage points.
    """

    label: str
    part: str
    whole: str | None = None
    share: bool = True


METRICS = {
    "em": Metric("EM", "em"),
    "f1": Metric("F1", "f1"),
    "acc": Metric("ACC (CEM)", "acc"),
    "lasj": Metric("LasJ", "lasj"),
    "osr": Metric("OSR", "steps_over", "searches_known"),
    "usr": Metric("USR", "steps_under", "own_steps_known"),
    "retrievals": Metric("RC", "retrievals", share=False),
    "steps": Metric("steps", "steps", share=False),
    "forced": Metric("forced", "forced"),
    "format_rate": Metric("in form", "format_rate"),
    "needless": Metric("needless", "needless", share=False),
    "early": Metric("early", "early"),
}


def read_seeds(folders: Mapping[int, Path], policy: str, setting: str) -> dict[int, dict[str, Row]]:
    """Read a policy's evaluations at one setting, by seed and question id; `setting` may be a pattern of file names.

    Raises:
        RunError: an evaluation is missing.
    """
    return {seed: _read_rows(folder, policy, setting) for seed, folder in folders.items()}


def described(seeds: Seeds, metrics: Sequence[str], *, seed: int = 0) -> Results:
    """Return the metrics of one variant.

    Args:
        seeds: rows of at least one seed.
        metrics: keys of `METRICS`.
        seed: random seed of the bootstrap.

    Returns:
        `all` and `by_kind` with an interval (or None) per metric, `by_seed` with a list of means per metric.
    """
    columns = _Columns(seeds)
    values, by_seed = {}, {}
    for name in metrics:
        values[name] = columns.of(METRICS[name])
        by_seed[name] = [_mean(METRICS[name], seeds[number]) for number in sorted(seeds)]
    return columns.results(values, by_seed, seed)


def difference(first: Seeds, second: Seeds, metrics: Sequence[str], *, seed: int = 0) -> Results | None:
    """Return first minus second, paired by question over the seeds that both have; None if they share none.

    The result has the shape of `described`.
    """
    common = sorted(first.keys() & second.keys())
    # A question counts for both or for neither, seed by seed.
    left, right = _Columns(_shared(first, second, common)), _Columns(_shared(second, first, common))
    if not left.ids:
        return None
    values, by_seed = {}, {}
    for name in metrics:
        metric = METRICS[name]
        values[name] = subtract(left.of(metric), right.of(metric))
        by_seed[name] = subtract(
            [_mean(metric, left.seeds[number]) for number in common],
            [_mean(metric, right.seeds[number]) for number in common],
        )
    return left.results(values, by_seed, seed)


def mean_hops(seeds: Seeds) -> dict[str, float]:
    """Return the searches that questions of each kind need on average, for the kinds whose data set says so."""
    hops: dict[str, dict[str, int]] = {}
    for rows in seeds.values():
        for question, row in rows.items():
            if row["kind"] and row["hops"] is not None:
                hops.setdefault(row["kind"], {})[question] = row["hops"]
    return {kind: fmean(by_question.values()) for kind, by_question in sorted(hops.items())}


def sign(interval: Mapping[str, float] | None) -> int | None:
    """Return the sign of an interval that excludes 0, 0 for one that includes it, None if nothing was measured.

    >>> sign({"mean": 0.2, "low": 0.1, "high": 0.3}), sign({"mean": 0.2, "low": 0.0, "high": 0.3}), sign(None)
    (1, 0, None)
    """
    if interval is None:
        return None
    return (1 if interval["low"] > 0 else -1) if excludes_zero(interval) else 0


def verdict(interval: Mapping[str, float] | None, paper: float) -> str:
    """Compare the sign of a difference with the paper's: "agree", "disagree", or neither.

    "undecided" if our interval includes 0, "unknown" if there is none, "no sign" if the paper's difference is 0.

    >>> verdict({"mean": -0.2, "low": -0.3, "high": -0.1}, 5.9), verdict({"mean": 0.2, "low": -0.1, "high": 0.3}, 5.9)
    ('disagree', 'undecided')
    """
    ours = sign(interval)
    if ours is None:
        return "unknown"
    if not paper:
        return "no sign"
    if not ours:
        return "undecided"
    return "agree" if (ours > 0) == (paper > 0) else "disagree"


class _Columns:
    """Values by question over several seeds, ready to be resampled."""

    def __init__(self, seeds: Seeds) -> None:
        self.seeds = seeds
        self.ids = sorted({question for rows in seeds.values() for question in rows})
        self._kinds = {question: row["kind"] for rows in seeds.values() for question, row in rows.items()}

    def of(self, metric: Metric) -> Column | Ratio:
        """Return `[n]` means over the seeds, or the sums of numerator and denominator."""
        if metric.whole is None:
            return [self._over_seeds(fmean, metric.part, question) for question in self.ids]
        return Ratio(
            [self._over_seeds(sum, metric.part, question) for question in self.ids],
            [self._over_seeds(sum, metric.whole, question) for question in self.ids],
        )

    def results(self, values: Mapping[str, Column | Ratio], by_seed: Results, seed: int) -> Results:
        """Return what `described` does, given the values of each metric in the order of `ids`."""
        groups: dict[str, list[int]] = {}
        for index, question in enumerate(self.ids):
            groups.setdefault(self._kinds[question], []).append(index)
        kinds = {kind: members for kind, members in sorted(groups.items()) if kind}
        found: Results = {}
        for group, by_metric in group_intervals(values, {"": range(len(self.ids)), **kinds}, seed=seed).items():
            found[group] = {name: None if value is None else asdict(value) for name, value in by_metric.items()}
        counts = {"seeds": sorted(self.seeds), "questions": len(self.ids)}
        return {**counts, "all": found.pop(""), "by_kind": found, "by_seed": by_seed}

    def _over_seeds(self, combine: Callable[[Sequence[float]], float], column: str, question: str) -> float | None:
        """Combine a question's values of the seeds that have one; None if no seed has."""
        rows = [rows[question] for rows in self.seeds.values() if question in rows]
        values = [float(row[column]) for row in rows if row.get(column) is not None]
        return combine(values) if values else None


def _read_rows(evaluation: Path, policy: str, setting: str) -> dict[str, Row]:
    """Read the columns of `METRICS` by question id; `needless` and `early` are derived from searches and hops."""
    import pyarrow.parquet as pq

    files = sorted((evaluation / policy / "trajectories").glob(f"{setting}-*.parquet"))
    if not files:
        raise RunError(f"{evaluation / policy} has no trajectories at {setting}; run the evaluation again")
    wanted = {"question_id", "kind", "hops"}
    for metric in METRICS.values():
        wanted |= {metric.part, metric.whole or metric.part}
    rows: dict[str, Row] = {}
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            # An evaluation without a judge has no judged columns.
            columns = sorted(wanted & set(file.schema_arrow.names))
            for row in file.read(columns).to_pylist():
                if row["hops"] is not None:
                    extra = row["retrievals"] - row["hops"]
                    row["needless"] = max(extra, 0)
                    row["early"] = int(extra < 0 and row["kind"] != "known")
                rows[row["question_id"]] = row
    return rows


def _shared(seeds: Seeds, other: Seeds, common: Sequence[int]) -> dict[int, dict[str, Row]]:
    """Return the rows of `seeds` whose question and seed `other` has too."""
    shared = {}
    for number in common:
        shared[number] = {question: row for question, row in seeds[number].items() if question in other[number]}
    return shared


def _mean(metric: Metric, rows: Mapping[str, Row]) -> float | None:
    """Return the mean or rate of one seed."""
    known = [row for row in rows.values() if row.get(metric.part) is not None]
    part = sum(float(row[metric.part]) for row in known)
    whole: Any = len(known) if metric.whole is None else sum(row[metric.whole] for row in known)
    return part / whole if whole else None
