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
_BYTES = 2_000_000  # what fits a core's cache is done in half the time
_BYTES_A_DRAW = 24  # an index, a count, and the count as a float
_DIGITS = 10  # the order in which a processor adds up may not show


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` questions, or a ratio that is about `n` of them, and the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int


Column = Sequence[float | None]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over questions divided by another one, or the difference of two such: a micro-average (HiPRAG, eq. 2).

    Args:
        part: `[n]` numerators by question, such as its needless searches; None where the question has no value.
        whole: `[n]` denominators >= 0, such as its searches; 0 where the question has none. None where `part` is.
        minus: a ratio of the same questions to subtract; a question without a value on either side is left out.
    """

    part: Column
    whole: Column
    minus: Ratio | None = None

    def __len__(self) -> int:
        """Questions."""
        return len(self.part)

    def take(self, places: Sequence[int]) -> Ratio:
        """That of some of the questions."""
        minus = None if self.minus is None else self.minus.take(places)
        return Ratio([self.part[place] for place in places], [self.whole[place] for place in places], minus)

    @property
    def columns(self) -> list[Column]:
        """Numerators and denominators; of a difference four columns, the minuend's first."""
        return [self.part, self.whole, *([] if self.minus is None else self.minus.columns)]


def intervals(
    columns: Mapping[K, Column | Ratio],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    max_bytes: int = _BYTES,
) -> dict[K, Interval | None]:
    """The mean of each column, or the ratio, with its percentile interval.

    Args:
        columns: `[n]` values under any key, one a question, in the same order; None where a question has no value,
            which leaves it out of that column. Or a ratio of two such columns.
        seed: equal seeds give equal intervals, whatever other columns there are.
        resamples: of the questions, with replacement. One in which a ratio is about nothing is left out of it.
        level: of the interval, in (0, 1).
        max_bytes: memory for the resamples, roughly; never less than one resample. It changes no result.

    Returns:
        None for a column without any value, and for a ratio of nothing.

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
        places = [place for place, has_value in enumerate(known) if has_value]
        if not places:
            continue
        raw = [[column[place] for place in places] for name in names for column in _raw(columns[name])]
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


def subtract(first: Column, second: Column) -> list[float | None]:
    """`[n]` differences by question; None where either side has no value."""
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def _raw(column: Column | Ratio) -> list[Column]:
    """The columns that are resampled."""
    return column.columns if isinstance(column, Ratio) else [column]


def _alike(columns: Mapping[K, Column | Ratio]) -> dict[tuple[bool, ...], list[K]]:
    """Names of columns by which questions have a value: such columns share their resamples."""
    groups: dict[tuple[bool, ...], list[K]] = {}
    for name, column in columns.items():
        known = tuple(None not in values for values in zip(*_raw(column), strict=True))
        groups.setdefault(known, []).append(name)
    return groups


def _spans(names: Sequence[K], columns: Mapping[K, Column | Ratio]) -> Iterator[tuple[K, slice]]:
    """Where in the table the columns of each name are."""
    start = 0
    for name in names:
        end = start + len(_raw(columns[name]))
        yield name, slice(start, end)
        start = end


def _combined(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[r]` values of a metric from the `[r, 1, 2 or 4]` means of its columns; NaN where a ratio is about nothing."""
    import numpy as np

    if means.shape[1] == 1:
        return means[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = means[:, ::2] / means[:, 1::2]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]


def _about(table: NDArray[np.float64]) -> int:
    """Questions in a metric; of a ratio those with something in its denominator, of a difference on the poorer side."""
    return len(table) if table.shape[1] == 1 else min(int((whole > 0).sum()) for whole in table.T[1::2])


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)


def _resampled_means(
    table: NDArray[np.float64], rng: np.random.Generator, resamples: int, max_bytes: int
) -> NDArray[np.float64]:
    """`[resamples, m]` means of resampled rows of `table`, `[n, m]`."""
    import numpy as np

    n = len(table)
    means = np.empty((resamples, table.shape[1]))
    chunk = max(1, max_bytes // (_BYTES_A_DRAW * n))
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means[start : start + rows] = counts.astype(np.float64) @ table / n
    return means
