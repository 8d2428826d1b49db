"""Percentile bootstrap of means and of paired differences (Efron and Tibshirani, An Introduction to the Bootstrap, 13).

All metrics of a group of questions share their resamples: a resample is a vector of how often each question was drawn,
so many resamples times all metrics are one matrix product.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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
    """A mean over `n` questions and the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int


Column = Sequence[float | None]
K = TypeVar("K", bound=Hashable)


def intervals(
    columns: Mapping[K, Column],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    max_bytes: int = _BYTES,
) -> dict[K, Interval | None]:
    """The mean of each column with its percentile interval.

    Args:
        columns: `[n]` values under any key, one a question, in the same order; None where a question has no value,
            which leaves it out of that column.
        seed: equal seeds give equal intervals, whatever other columns there are.
        resamples: of the questions, with replacement.
        level: of the interval, in (0, 1).
        max_bytes: memory for the resamples, roughly; never less than one resample. It changes no result.

    Returns:
        None for a column without any value.

    Raises:
        ValueError: a value is not finite, or columns differ in length.
    """
    import numpy as np

    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("columns of different lengths: their values are not of the same questions")
    found: dict[K, Interval | None] = dict.fromkeys(columns)
    for names in _alike(columns):
        kept = [[value for value in columns[name] if value is not None] for name in names]
        if not kept[0]:
            continue
        table = np.array(kept, dtype=np.float64).T
        if not np.isfinite(table).all():
            raise ValueError(f"a value of {', '.join(map(str, names))} is not finite; a missing one has to be None")
        means = _resampled_means(table, np.random.default_rng(seed), resamples, max_bytes)
        bounds = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        for name, mean, low, high in zip(names, table.mean(axis=0), *bounds, strict=True):
            found[name] = Interval(_rounded(mean), _rounded(low), _rounded(high), len(table))
    return found


def paired_differences(
    first: Mapping[K, Column], second: Mapping[K, Column], *, seed: int, resamples: int = RESAMPLES
) -> dict[K, Interval | None]:
    """`first - second` for each metric that both have, resampled by question: what a question does to both cancels.

    Args:
        first: `[n]` values by metric, of the same questions in the same order as `second`.
        second: likewise; a question that has no value on either side is left out of that metric.
        seed: as of `intervals`.
        resamples: as of `intervals`.
    """
    differences = {name: subtract(first[name], second[name]) for name in first if name in second}
    return intervals(differences, seed=seed, resamples=resamples)


def subtract(first: Column, second: Column) -> list[float | None]:
    """`[n]` differences by question; None where either side has no value."""
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def _alike(columns: Mapping[K, Column]) -> list[list[K]]:
    """Names of columns by which questions have a value: such columns share their resamples."""
    groups: dict[tuple[bool, ...], list[K]] = {}
    for name, column in columns.items():
        groups.setdefault(tuple(value is None for value in column), []).append(name)
    return list(groups.values())


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
