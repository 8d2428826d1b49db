"""Percentile bootstrap of means, ratios and paired differences (Efron and Tibshirani, An Introduction to the
Bootstrap, 13).

All metrics of a group of questions share their resamples: a resample is a vector of how often each question was drawn,
so many resamples times all metrics are one matrix product. A ratio of sums, such as a rate over all steps of all
questions, is made of two of its columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    max_bytes: int = _BYTES,
) -> dict[K, Interval | None]:
    """Return the mean of each column, or the ratio, with its percentile interval.

    Args:
        columns: `[n]` values by question under any key, all in the same order; a question whose value is None is left
            out of that column. Or a ratio of two such columns.
        seed: random seed; equal seeds give equal intervals, whatever other columns there are.
        resamples: number of times the questions are drawn with replacement. A resample in which the denominator of a
            ratio is 0 is left out of that ratio.
        level: confidence level of the interval, in (0, 1).
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

    if len({len(column) for name in columns for column in _raw(columns[name])}) > 1:
        raise ValueError("columns of different lengths: their values are not of the same questions")
    found: dict[K, Interval | None] = dict.fromkeys(columns)
    for known, names in _alike(columns).items():
        indices = [index for index, has_value in enumerate(known) if has_value]
        if not indices:
            continue
        raw = [[column[index] for index in indices] for name in names for column in _raw(columns[name])]
        table = np.array(raw, dtype=np.float64).T
        if not np.isfinite(table).all():
            raise ValueError(f"a value of {', '.join(map(str, names))} is not finite; a missing one has to be None")
        means = _resampled_means(table, np.random.default_rng(seed), resamples, max_bytes)
        whole = table.mean(axis=0)
        for name, of in _spans(names, columns):
            estimate, drawn = _combined(whole[None, of])[0], _combined(means[:, of])
            drawn = drawn[np.isfinite(drawn)]
            if not np.isfinite(estimate) or not len(drawn):
                continue
            low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
            found[name] = Interval(_rounded(estimate), _rounded(low), _rounded(high), _about(table[:, of]))
    return found


def group_intervals(
    columns: Mapping[K, Column | Ratio], groups: Mapping[str, Sequence[int]], *, seed: int
) -> dict[str, dict[K, Interval | None]]:
    """Return the intervals of `columns` for each group of questions, given as indices of the columns."""
    found = {}
    for group, indices in groups.items():
        found[group] = intervals({key: _take(column, indices) for key, column in columns.items()}, seed=seed)
    return found


def subtract(first: Column | Ratio, second: Column | Ratio) -> Column | Ratio:
    """Return differences by question, None if either side has no value; or the difference of two ratios."""
    if isinstance(first, Ratio) and isinstance(second, Ratio):
        return Ratio(first.part, first.whole, minus=second)
    if isinstance(first, Ratio) or isinstance(second, Ratio):
        raise TypeError("a ratio can only be subtracted from a ratio")
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def _take(column: Column | Ratio, indices: Sequence[int]) -> Column | Ratio:
    """Return the values of some of the questions."""
    if isinstance(column, Ratio):
        columns = [[values[index] for index in indices] for values in column.columns]
        return Ratio(columns[0], columns[1], Ratio(columns[2], columns[3]) if column.minus else None)
    return [column[index] for index in indices]


def _raw(column: Column | Ratio) -> list[Column]:
    """Return the columns that are resampled."""
    return column.columns if isinstance(column, Ratio) else [column]


def _alike(columns: Mapping[K, Column | Ratio]) -> dict[tuple[bool, ...], list[K]]:
    """Group the names of columns by the questions that have a value: such columns share their resamples."""
    groups: dict[tuple[bool, ...], list[K]] = {}
    for name, column in columns.items():
        known = tuple(None not in values for values in zip(*_raw(column), strict=True))
        groups.setdefault(known, []).append(name)
    return groups


def _spans(names: Sequence[K], columns: Mapping[K, Column | Ratio]) -> Iterator[tuple[K, slice]]:
    """Yield which columns of the table belong to each name."""
    start = 0
    for name in names:
        end = start + len(_raw(columns[name]))
        yield name, slice(start, end)
        start = end


def _combined(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `[r]` values of a metric from the `[r, 1, 2 or 4]` means of its columns; NaN for a denominator of 0."""
    import numpy as np

    if means.shape[1] == 1:
        return means[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = means[:, ::2] / means[:, 1::2]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]


def _about(table: NDArray[np.float64]) -> int:
    """Count the questions of a metric: for a ratio those with a denominator above 0, for a difference the fewer."""
    return len(table) if table.shape[1] == 1 else min(int((whole > 0).sum()) for whole in table.T[1::2])


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)


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
