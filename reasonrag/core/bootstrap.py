"""Intervals of means, ratios and paired differences over questions, or over questions and training seeds.

Questions are resampled: the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 13). All
metrics of a group of questions share their resamples: a resample is a vector of how often each question was drawn, so
many resamples times all metrics are one matrix product.

Several seeds answer the same questions: two crossed factors (Owen, The pigeonhole bootstrap, 2007). Three seeds are too
few to resample, so their part is a normal draw with the standard error of their estimates, and the sum is spread out
like Student's t with Satterthwaite's degrees of freedom (An approximate distribution of estimates of variance
components, 1946). One seed leaves the bootstrap over questions. The part of a question that shows with
one seed only is counted in both parts, so the interval is slightly wide, as Owen's is; docs/evaluation.md has how often
it holds the truth.

Draws can be repeated, as `tools/recompute.py` does: with `rng = numpy.random.default_rng(seed)`, resample `r` of `n`
questions is row `r` of `rng.integers(0, n, (resamples, n))`, and `numpy.random.default_rng([seed, 1])` gives the normal
draws, then the chi-squares.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
FALSE_DISCOVERIES = 0.05  # share of the differences called certain that may be chance
_BYTES = 2_000_000  # resamples that fit the cache of a core take half the time
_BYTES_PER_DRAW = 24  # an index, a count, and the count as a float
_DIGITS = 10  # fewer than a float has, so that the order in which a processor adds up does not show


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` questions, or a ratio to which `n` questions contribute, with its interval."""

    mean: float
    low: float
    high: float
    n: int
    p: float | None = None  # of a difference: how likely one as far from 0 is by chance, two-sided


Column = Sequence[float | None]  # `[n]` values by question, None if unknown
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over questions divided by another sum (HiPRAG, eq. 2).

    Args:
        part: `[n]` numerators by question, such as needless searches; None if the question has no value.
        whole: `[n]` denominators >= 0, such as searches; 0 if the question has none, None if `part` is None.
    """

    part: Column
    whole: Column


@dataclass(frozen=True, slots=True)
class Difference:
    """First minus second, paired by question: of two columns, or of two ratios; what one side lacks is left out."""

    first: Column | Ratio
    second: Column | Ratio


Measure = Column | Ratio | Difference


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """The same measure of the same questions with each of several training seeds.

    A mean is over all attempts that have a value, so a question counts as often as seeds answered it; the sums of a
    ratio are over seeds too.
    """

    by_seed: Sequence[Measure]


def intervals(
    measures: Mapping[K, Measure | OverSeeds],
    *,
    seed: int,
    among: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    max_bytes: int = _BYTES,
) -> dict[K, Interval | None]:
    """Return the mean of each column, the ratio or the difference, with its interval over questions and seeds.

    Args:
        measures: under any key, all of the same questions in the same order; a question without a value (None) is
            left out of that measure.
        seed: random seed; equal seeds give equal intervals, whatever other measures are computed.
        among: indices of the questions to use; None uses all.
        resamples: number of times the questions are drawn with replacement. A resample in which the denominator of a
            ratio is 0 is left out of that ratio.
        max_bytes: approximate memory for the resamples, at least one resample. It changes no result.

    Returns:
        An interval by key; None for a column without any value, and for a ratio over 0. It ends where
        the values of single questions do: a share stays within [0, 1].

    Raises:
        ValueError: a value is not finite, or measures differ in length.
        TypeError: a difference is of a ratio and a column.

    One of one search was needless in the first question, none of three in the second:

    >>> intervals({"osr": Ratio([1, 0], [1, 3]), "mean": [1.0, 0.0]}, seed=0)["osr"]
    Interval(mean=0.25, low=0.0, high=1.0, n=2, p=None)
    """
    import numpy as np

    cells = {key: _cells(measure, key) for key, measure in measures.items()}
    if len({cell.shape[2] for cell in cells.values()}) > 1:
        raise ValueError("measures of different lengths: their values are not of the same questions")
    # Keys with values for the same questions share their resamples.
    keys_by_questions: dict[tuple[int, ...], list[K]] = {}
    for key, cell in cells.items():
        answered: NDArray[np.bool_] = np.logical_not(np.isnan(cell[:, 0]).all(axis=0))
        questions = range(cell.shape[2]) if among is None else among
        keys_by_questions.setdefault(tuple(index for index in questions if answered[index]), []).append(key)
    found: dict[K, Interval | None] = dict.fromkeys(measures)
    for known, keys in keys_by_questions.items():
        if not known:
            continue
        of_keys = [cells[key][:, :, list(known)] for key in keys]
        columns = [_over_seeds(cell) for cell in of_keys]
        table = np.concatenate(columns).T
        means = _resampled_means(table, np.random.default_rng(seed), resamples, max_bytes)
        end = 0
        for key, cell, of_key in zip(keys, of_keys, columns, strict=True):
            start, end = end, end + len(of_key)
            drawn = _combined(means[:, start:end])
            drawn = drawn[np.isfinite(drawn)]
            estimate = _estimate(cell)
            if estimate is not None and len(drawn):
                drawn = _with_seeds(drawn, estimate, cell, seed)
                low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                # A ratio counts the questions with a denominator above 0, a difference the fewer of both sides.
                wholes = table[:, start + 1 : end : 2]
                n = int((wholes > 0).sum(axis=0).min()) if wholes.size else len(table)
                measure = measures[key]
                first = measure.by_seed[0] if isinstance(measure, OverSeeds) else measure
                p = _chance(drawn) if isinstance(first, Difference) else None
                mean, low, high = (round(float(value), _DIGITS) for value in (estimate, low, high))
                found[key] = Interval(mean, low, high, n, p)
    return found


def group_intervals(
    measures: Mapping[K, Measure | OverSeeds], groups: Mapping[str, Sequence[int]], *, seed: int
) -> dict[str, dict[K, dict[str, Any] | None]]:
    """Return the intervals of `measures` as JSON for each group of questions; only differences have a `p`."""
    by_group: dict[str, dict[K, dict[str, Any] | None]] = {}
    for group, members in groups.items():
        by_group[group] = {}
        for key, interval in intervals(measures, seed=seed, among=members).items():
            fields = asdict(interval) if interval else {}
            by_group[group][key] = {name: value for name, value in fields.items() if value is not None} or None
    return by_group


def estimates_by_seed(measure: OverSeeds) -> list[float | None]:
    """Return the mean, ratio or difference with each seed alone; None if it has no values."""
    return [_estimate(cell[None]) for cell in _cells(measure, "measure")]


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return each p-value adjusted for how many there are (Benjamini and Hochberg, 1995, step-up).

    Of the differences with an adjusted value of at most 0.05, at most 5 % are expected to be chance, also for tests
    that depend positively on each other, as metrics of the same answers mostly do (Benjamini and Yekutieli, 2001).

    >>> adjusted([0.01, 0.04, 0.03, 0.5])
    [0.04, 0.05333333333333334, 0.05333333333333334, 0.5]
    """
    result = [1.0] * len(p_values)
    least = 1.0
    for rank, index in reversed(list(enumerate(sorted(range(len(p_values)), key=p_values.__getitem__), start=1))):
        least = result[index] = min(least, p_values[index] * len(p_values) / rank)
    return result


def add_adjusted(differences: Sequence[dict[str, Any]]) -> None:
    """Give each difference its `p_adjusted`: its `p`, adjusted for how many differences there are."""
    for difference, p in zip(differences, adjusted([difference["p"] for difference in differences]), strict=True):
        difference["p_adjusted"] = round(p, _DIGITS)


def _cells(measure: Measure | OverSeeds, key: object) -> NDArray[np.float64]:
    """Return `[seeds, 1, 2 or 4, n]` values, or numerators and denominators; NaN where a question has none."""
    import numpy as np

    by_seed = measure.by_seed if isinstance(measure, OverSeeds) else [measure]
    cells = np.array([_columns(one, key) for one in by_seed])
    return np.where(np.isnan(cells).any(axis=1, keepdims=True), np.nan, cells)


def _columns(measure: Measure, key: object) -> NDArray[np.float64]:
    """Return `[1, n]` values, `[2, n]` numerators and denominators, or those of both sides of a difference."""
    import numpy as np

    if isinstance(measure, Difference):
        first, second = _columns(measure.first, key), _columns(measure.second, key)
        if len(first) != len(second):
            raise TypeError("a ratio can only be subtracted from a ratio")
        return first - second if len(first) == 1 else np.concatenate([first, second])
    columns = [measure.part, measure.whole] if isinstance(measure, Ratio) else [measure]
    for column in columns:
        if not all(value is None or math.isfinite(value) for value in column):
            raise ValueError(f"a value of {key} is not finite; a missing one has to be None")
    return np.array(columns, dtype=np.float64)


def _over_seeds(cell: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `[1, n]` values by question, or `[2 or 4, n]` sums of numerators and denominators.

    Values that unequally many seeds know become a ratio as well: their sums, and how many they are.
    """
    import numpy as np

    sums: NDArray[np.float64] = np.nansum(cell, axis=0)
    if cell.shape[1] > 1:
        return sums
    counts = (~np.isnan(cell)).sum(axis=0)
    return sums / counts if (counts == counts[0, 0]).all() else np.concatenate([sums, counts])


def _estimate(cell: NDArray[np.float64]) -> float | None:
    """Return the mean, ratio or difference over all questions that any seed knows."""
    import numpy as np

    known = cell[:, :, ~np.isnan(cell[:, 0]).all(axis=0)]
    if not known.size:
        return None
    estimate = _combined(_over_seeds(known).mean(axis=1)[None])[0]
    return float(estimate) if np.isfinite(estimate) else None


def _with_seeds(
    drawn: NDArray[np.float64], estimate: float, cell: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Return draws over questions and seeds, given `[r]` draws over questions alone."""
    import numpy as np

    by_seed = [one for one in (_estimate(of_seed[None]) for of_seed in cell) if one is not None]
    error = float(np.var(by_seed, ddof=1)) / len(by_seed) if len(by_seed) > 1 else 0.0
    if not error:
        return drawn
    freedom = (len(by_seed) - 1) * ((error + drawn.var()) / error) ** 2
    rng = np.random.default_rng([seed, 1])
    deviations = drawn - estimate + math.sqrt(error) * rng.standard_normal(len(drawn))
    deviations *= np.sqrt(freedom / rng.chisquare(freedom, len(drawn)))
    return np.clip(estimate + deviations, *_range(cell))


def _range(cell: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least and the greatest value that a single question has with a single seed."""
    import numpy as np

    if cell.shape[1] == 4:
        (low, high), (second_low, second_high) = _range(cell[:, :2]), _range(cell[:, 2:])
        return low - second_high, high - second_low
    with np.errstate(invalid="ignore", divide="ignore"):
        values = cell[:, 0] if cell.shape[1] == 1 else cell[:, 0] / cell[:, 1]
    return float(np.nanmin(values)), float(np.nanmax(values))


def _chance(drawn: NDArray[np.float64]) -> float:
    """Return the two-sided achieved significance level of a difference from 0 (Efron and Tibshirani, 15.4)."""
    import numpy as np

    drawn = np.round(drawn, _DIGITS)  # a draw without any difference counts for both sides
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return min(1.0, round(2 * (beyond + 1) / (len(drawn) + 1), _DIGITS))


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
