"""Percentile bootstrap of means, ratios and paired differences (Efron and Tibshirani, An Introduction to the
Bootstrap, 13).

All metrics of a group of questions share their resamples: a resample is a vector of how often each question was drawn,
so many resamples times all metrics are one matrix product. A ratio of sums, such as a rate over all steps of all
questions, is made of two of its columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
_BYTES = 2_000_000  # resamples that fit the cache of a core take half the time
_BYTES_PER_DRAW = 24  # an index, a count, and the count as a float
_DIGITS = 10  # fewer than a float has, so that the order in which a processor adds up does not show


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` questions, or a ratio to which `n` questions contribute, with its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int


Column = Sequence[float | None]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over questions divided by another sum, or the difference of two such ratios (HiPRAG, eq. 2).

    Args:
        part: `[n]` numerators by question, such as needless searches; None if the question has no value.
        whole: `[n]` denominators >= 0, such as searches; 0 if the question has none, None if `part` is None.
        minus: a ratio over the same questions to subtract; questions without a value on either side are left out.
    """

    part: Column
    whole: Column
    minus: Ratio | None = None

    @property
    def columns(self) -> list[Column]:
        """Numerators and denominators; four columns for a difference, the minuend's first."""
        return [self.part, self.whole, *([] if self.minus is None else self.minus.columns)]


def intervals(
    columns: Mapping[K, Column | Ratio],
    *,
    seed: int,
    among: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    max_bytes: int = _BYTES,
) -> dict[K, Interval | None]:
    """Return the mean of each column, or the ratio, with its percentile interval.

    Args:
        columns: `[n]` values by question under any key, all in the same order; a question whose value is None is left
            out of that column. Or a ratio of two such columns.
        seed: random seed; equal seeds give equal intervals, whatever other columns there are.
        among: indices of the questions to use; None uses all.
        resamples: number of times the questions are drawn with replacement. A resample in which the denominator of a
            ratio is 0 is left out of that ratio.
        max_bytes: approximate memory for the resamples, at least one resample. It changes no result.

    Returns:
        An interval by key; None for a column without any value, and for a ratio whose denominator is 0.

    Raises:
        ValueError: a value is not finite, or columns differ in length.

    One of one search was needless in the first question, none of three in the second:

    >>> intervals({"osr": Ratio([1, 0], [1, 3]), "mean": [1.0, 0.0]}, seed=0)["osr"]
    Interval(mean=0.25, low=0.0, high=1.0, n=2)
    """
    import numpy as np

    drawn_columns = {key: column.columns if isinstance(column, Ratio) else [column] for key, column in columns.items()}
    if len({len(column) for parts in drawn_columns.values() for column in parts}) > 1:
        raise ValueError("columns of different lengths: their values are not of the same questions")
    # Keys with values for the same questions share their resamples.
    keys_by_questions: dict[tuple[int, ...], list[K]] = {}
    for key, parts in drawn_columns.items():
        questions = range(len(parts[0])) if among is None else among
        known = tuple(index for index in questions if all(column[index] is not None for column in parts))
        keys_by_questions.setdefault(known, []).append(key)
    found: dict[K, Interval | None] = dict.fromkeys(columns)
    for known, keys in keys_by_questions.items():
        if not known:
            continue
        values = [[column[index] for index in known] for key in keys for column in drawn_columns[key]]
        table = np.array(values, dtype=np.float64).T
        if not np.isfinite(table).all():
            raise ValueError(f"a value of {', '.join(map(str, keys))} is not finite; a missing one has to be None")
        means = _resampled_means(table, np.random.default_rng(seed), resamples, max_bytes)
        observed = table.mean(axis=0)
        end = 0
        for key in keys:
            start, end = end, end + len(drawn_columns[key])
            estimate, drawn = _combined(observed[None, start:end])[0], _combined(means[:, start:end])
            drawn = drawn[np.isfinite(drawn)]
            if np.isfinite(estimate) and len(drawn):
                low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                # A ratio counts the questions with a denominator above 0, a difference the fewer of both sides.
                wholes = table[:, start + 1 : end : 2]
                n = int((wholes > 0).sum(axis=0).min()) if wholes.size else len(table)
                mean, low, high = (round(float(value), _DIGITS) for value in (estimate, low, high))
                found[key] = Interval(mean, low, high, n)
    return found


def group_intervals(
    columns: Mapping[K, Column | Ratio], groups: Mapping[str, Sequence[int]], *, seed: int
) -> dict[str, dict[K, dict[str, Any] | None]]:
    """Return the intervals of `columns` as JSON for each group of questions, given as indices of the columns."""
    by_group: dict[str, dict[K, dict[str, Any] | None]] = {}
    for group, members in groups.items():
        by_key = intervals(columns, seed=seed, among=members)
        by_group[group] = {key: None if interval is None else asdict(interval) for key, interval in by_key.items()}
    return by_group


def subtract(first: Column | Ratio, second: Column | Ratio) -> Column | Ratio:
    """Return differences by question, None if either side has no value; or the difference of two ratios."""
    if isinstance(first, Ratio) and isinstance(second, Ratio):
        return Ratio(first.part, first.whole, minus=second)
    if isinstance(first, Ratio) or isinstance(second, Ratio):
        raise TypeError("a ratio can only be subtracted from a ratio")
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def _combined(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `[r]` values of a metric from the `[r, 1, 2 or 4]` means of its columns; NaN for a denominator of 0."""
    import numpy as np

    if means.shape[1] == 1:
        return means[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = means[:, ::2] / means[:, 1::2]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]


def _resampled_means(
    table: NDArray[np.float64], rng: np.random.Generator, resamples: int, max_bytes: int
) -> NDArray[np.float64]:
    """Return `[resamples, m]` means of resampled rows of `table`, `[n, m]`."""
    import numpy as np

    n = len(table)
    means = np.empty((resamples, table.shape[1]))
    chunk = max(1, max_bytes // (_BYTES_PER_DRAW * n))
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means[start : start + rows] = counts.astype(np.float64) @ table / n
    return means
