"""Figures of ablations from their evaluations: means and rates over questions and seeds, and paired differences.

A question's value is its mean over the seeds. OSR and USR are micro-averages (arXiv:2510.07794, eq. 2): over all steps
of all questions and seeds. Questions are resampled, whole: intervals are about other questions, with these seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.evaluation.bootstrap import Column, Ratio, intervals, subtract
from reasonrag.reproduce.figures import Figures, Row, read_rows

Seeds = Mapping[int, Mapping[str, Row]]  # by seed and question id


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of an evaluation.

    Attributes:
        label: in tables.
        part: the column that is averaged, or the numerator.
        whole: the column of the denominator, of a rate over steps.
        share: whether it lies in [0, 1]; differences are then told in points.
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
    "format_rate": Metric("in form", "format_rate"),
}


def read_seeds(folders: Mapping[int, Path], policy: str, setting: str) -> dict[int, dict[str, Row]]:
    """The rows of a policy's evaluations at one setting, by seed and question id.

    Raises:
        RunError: one of them is not there.
    """
    columns = {column for metric in METRICS.values() for column in (metric.part, metric.whole) if column}
    return {seed: read_rows(folder, policy, setting, columns) for seed, folder in folders.items()}


def described(seeds: Seeds, metrics: Sequence[str], *, seed: int = 0) -> Figures:
    """One variant: `all` and `by_kind` with an interval (or None) a metric, `by_seed` with a mean (or None) a seed.

    Args:
        seeds: at least one.
        metrics: keys of `METRICS`.
        seed: of the bootstrap.
    """
    ids = sorted({question for rows in seeds.values() for question in rows})
    kinds = {question: row["kind"] for rows in seeds.values() for question, row in rows.items()}
    columns = {name: _column(METRICS[name], seeds, ids) for name in metrics}
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(ids):
        groups.setdefault(kinds[question], []).append(place)
    return {
        "seeds": sorted(seeds),
        "questions": len(ids),
        "all": _intervals(columns, seed),
        "by_kind": {
            kind: _intervals({name: _take(column, places) for name, column in columns.items()}, seed)
            for kind, places in sorted(groups.items())
            if kind
        },
        "by_seed": {name: [_mean(METRICS[name], seeds[number]) for number in sorted(seeds)] for name in metrics},
    }


def difference(first: Seeds, second: Seeds, metrics: Sequence[str], *, seed: int = 0) -> Figures | None:
    """First minus second, paired by question over the seeds that both have; None where they share none.

    Returns:
        `all` with an interval (or None) a metric, `by_seed` with a difference (or None) a seed.
    """
    common = sorted(first.keys() & second.keys())
    # A question counts for both or for neither, seed by seed.
    a = {number: _where(first[number], second[number]) for number in common}
    b = {number: _where(second[number], first[number]) for number in common}
    ids = sorted({question for rows in a.values() for question in rows})
    if not ids:
        return None
    columns = {
        name: _minus(_column(METRICS[name], a, ids), _column(METRICS[name], b, ids), METRICS[name]) for name in metrics
    }
    return {
        "seeds": common,
        "questions": len(ids),
        "all": _intervals(columns, seed),
        "by_seed": {
            name: [_less(_mean(METRICS[name], a[number]), _mean(METRICS[name], b[number])) for number in common]
            for name in metrics
        },
    }


def sign(interval: Mapping[str, float] | None) -> int | None:
    """Of an interval that excludes 0; 0 where it holds 0, None where nothing is known.

    >>> sign({"mean": 0.2, "low": 0.1, "high": 0.3}), sign({"mean": 0.2, "low": 0.0, "high": 0.3}), sign(None)
    (1, 0, None)
    """
    if interval is None:
        return None
    return int(interval["low"] > 0) - int(interval["high"] < 0)


def verdict(interval: Mapping[str, float] | None, paper: float) -> str:
    """How the sign of a difference compares with the paper's: `agree`, `disagree`, or neither of the two.

    `undecided` where our interval holds 0, `unknown` where there is none, `no sign` where the paper's difference is 0.

    >>> verdict({"mean": -0.2, "low": -0.3, "high": -0.1}, 5.9), verdict({"mean": 0.2, "low": -0.1, "high": 0.3}, 5.9)
    ('disagree', 'undecided')
    """
    ours = sign(interval)
    if ours is None:
        return "unknown"
    if not paper:
        return "no sign"
    return "undecided" if not ours else "agree" if (ours > 0) == (paper > 0) else "disagree"


def _intervals(columns: Mapping[str, Column | Ratio], seed: int) -> Figures:
    return {name: found and asdict(found) for name, found in intervals(columns, seed=seed).items()}


def _column(metric: Metric, seeds: Seeds, ids: Sequence[str]) -> Column | Ratio:
    """`[n]` a question: its mean over the seeds, or its sums of both."""
    if metric.whole is None:
        return [_over(fmean, metric.part, seeds, question) for question in ids]
    return Ratio(
        [_over(sum, metric.part, seeds, question) for question in ids],
        [_over(sum, metric.whole, seeds, question) for question in ids],
    )


def _over(combine: Callable[[Sequence[float]], float], column: str, seeds: Seeds, question: str) -> float | None:
    """Of a question's values over the seeds that have one; None where none has."""
    rows = [rows[question] for rows in seeds.values() if question in rows]
    values = [float(row[column]) for row in rows if row.get(column) is not None]
    return combine(values) if values else None


def _take(column: Column | Ratio, places: Sequence[int]) -> Column | Ratio:
    return column.take(places) if isinstance(column, Ratio) else [column[place] for place in places]


def _minus(first: Column | Ratio, second: Column | Ratio, metric: Metric) -> Column | Ratio:
    if isinstance(first, Ratio) and isinstance(second, Ratio):
        return Ratio(first.part, first.whole, minus=second)
    if isinstance(first, Ratio) or isinstance(second, Ratio):
        raise TypeError(f"{metric.label} is a rate on one side only")
    return subtract(first, second)


def _where(rows: Mapping[str, Row], other: Mapping[str, Row]) -> dict[str, Row]:
    return {question: row for question, row in rows.items() if question in other}


def _mean(metric: Metric, rows: Mapping[str, Row]) -> float | None:
    known = [row for row in rows.values() if row.get(metric.part) is not None]
    part = sum(float(row[metric.part]) for row in known)
    whole: Any = len(known) if metric.whole is None else sum(row[metric.whole] for row in known)
    return part / whole if whole else None


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
