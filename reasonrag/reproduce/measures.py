"""Metrics of a comparison, read from its evaluations: means and rates over questions and seeds, and paired differences.

The value of a question is its mean over the seeds. OSR and USR are micro-averages (arXiv:2510.07794, eq. 2): over all
steps of all questions and seeds. Whole questions are resampled: an interval is about other questions, with these seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """One metric of a comparison: the mean of a column over questions, or a rate over steps."""

    label: str  # in tables
    part: str  # the column that is averaged, or the numerator of the rate
    whole: str | None = None  # the denominator of the rate
    share: bool = True  # whether it lies in [0, 1], so that differences are shown in percentage points


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


def described(seeds: Seeds, metrics: Sequence[str]) -> Results:
    """Return the metrics of one variant, given as keys of `METRICS`.

    Returns:
        `all` and `by_kind` with an interval (or None) per metric, `by_seed` with a list of means per metric.
    """
    return _results([seeds], metrics)


def difference(first: Seeds, second: Seeds, metrics: Sequence[str]) -> Results | None:
    """Return first minus second, paired by question over the seeds that both have; None if they share none.

    The result has the shape of `described`.
    """
    # A question counts for both or for neither, seed by seed.
    sides: list[dict[int, dict[str, Row]]] = [{}, {}]
    for seed in sorted(first.keys() & second.keys()):
        common = first[seed].keys() & second[seed].keys()
        for side, seeds in zip(sides, (first, second), strict=True):
            side[seed] = {question: row for question, row in seeds[seed].items() if question in common}
    return _results(sides, metrics) if any(sides[0].values()) else None


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


def _results(sides: Sequence[Seeds], metrics: Sequence[str]) -> Results:
    """Return the metrics of one variant, or the differences of two that have the same questions and seeds."""
    kinds: dict[str, str] = {}
    for rows in sides[0].values():
        kinds |= {question: row["kind"] for question, row in rows.items()}
    questions, numbers = sorted(kinds), sorted(sides[0])
    values: dict[str, Column | Ratio] = {}
    by_seed: Results = {}
    for name in metrics:
        columns = [_column(METRICS[name], seeds, questions) for seeds in sides]
        means = [[_mean(METRICS[name], seeds[number]) for number in numbers] for seeds in sides]
        values[name] = subtract(*columns) if len(sides) == 2 else columns[0]
        by_seed[name] = subtract(*means) if len(sides) == 2 else means[0]
    groups: dict[str, list[int]] = {"": list(range(len(questions)))}
    for kind in sorted(set(kinds.values()) - {""}):
        groups[kind] = [index for index, question in enumerate(questions) if kinds[question] == kind]
    by_group = group_intervals(values, groups, seed=0)
    counts = {"seeds": numbers, "questions": len(questions)}
    return {**counts, "all": by_group.pop(""), "by_kind": by_group, "by_seed": by_seed}


def _column(metric: Metric, seeds: Seeds, questions: Sequence[str]) -> Column | Ratio:
    """Return `[n]` means over the seeds that have a value, or the sums of numerator and denominator."""

    def over_seeds(combine: Callable[[Sequence[float]], float], column: str) -> Column:
        combined: list[float | None] = []
        for question in questions:
            rows = [rows[question] for rows in seeds.values() if question in rows]
            values = [float(row[column]) for row in rows if row.get(column) is not None]
            combined.append(combine(values) if values else None)
        return combined

    if metric.whole is None:
        return over_seeds(fmean, metric.part)
    return Ratio(over_seeds(sum, metric.part), over_seeds(sum, metric.whole))


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


def _mean(metric: Metric, rows: Mapping[str, Row]) -> float | None:
    """Return the mean or rate of one seed."""
    known = [row for row in rows.values() if row.get(metric.part) is not None]
    part = sum(float(row[metric.part]) for row in known)
    whole: Any = len(known) if metric.whole is None else sum(row[metric.whole] for row in known)
    return part / whole if whole else None
