"""Intervals of means, ratios and paired differences over questions.

Questions are resampled: the percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap,
13). All metrics of a group of questions share their resamples: a resample is a vector of how often each
question was drawn, so many resamples times all metrics are one matrix product.

Draws can be repeated, as `tools/recompute.py` does: with `rng = numpy.random.default_rng(seed)`, resample
`r` of `n` questions is row `r` of `rng.integers(0, n, (resamples, n))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
FALSE_DISCOVERIES = 0.05  # share of the differences called certain that may be chance
_DRAWS_AT_ONCE = 100_000  # of questions: that many fit the cache of a core, which takes half the time
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
        whole: `[n]` denominators >= 0, such as searches; 0
            if the question has none, None if `part` is None.
    """

    part: Column
    whole: Column


@dataclass(frozen=True, slots=True)
class Difference:
    """First minus second, paired by question: of two columns, or of two ratios; what one side lacks is left out."""

    first: Column | Ratio
    second: Column | Ratio


Measure = Column | Ratio | Difference


def intervals(
    measures: Mapping[K, Measure],
    *,
    seed: int,
    among: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    spread: Callable[[K, NDArray[np.float64], float], NDArray[np.float64]] | None = None,
) -> dict[K, Interval | None]:
    """Return the mean of each column, the ratio or the difference, with its interval over questions.

    Args:
        measures: under any key, all of the same questions in the same order; a question without a value
            (None) is left out of that measure.
        seed: random seed; equal seeds give equal intervals, whatever other measures are computed.
        among: indices of the questions to use; None uses all.
        resamples: number of times the questions are drawn with replacement. A resample in which the
            denominator of a ratio is 0 is left out of that ratio.
        spread: called with a key, its draws and its estimate;
            returns other draws, which vary for more reasons.

    Returns:
        An interval by key; None for a column without any value, and for a ratio over 0. It ends where
        the values of single questions do: a share stays within [0, 1].

    Raises:
        ValueError: a value is not finite, or measures differ in length.

    One of one search was needless in the first question, none of three in the second:

    >>> intervals({"osr": Ratio([1, 0], [1, 3]), "mean": [1.0, 0.0]}, seed=0)["osr"]
    Interval(mean=0.25, low=0.0, high=1.0, n=2, p=None)
    """
    import numpy as np

    tables = {key: _table(measure, key) for key, measure in measures.items()}
    if len({table.shape[1] for table in tables.values()}) > 1:
        raise ValueError("measures of different lengths: their values are not of the same questions")
    # Measures that know the same questions share their resamples.
    keys_by_questions: dict[tuple[int, ...], list[K]] = {}
    for key, table in tables.items():
        is_known = np.isfinite(table[0])
        questions = range(table.shape[1]) if among is None else among
        keys_by_questions.setdefault(tuple(index for index in questions if is_known[index]), []).append(key)
    results: dict[K, Interval | None] = dict.fromkeys(measures)
    for known, keys in keys_by_questions.items():
        if not known:
            continue
        joined = np.concatenate([tables[key][:, list(known)] for key in keys])
        means = _resampled_means(joined.T, seed, resamples)
        start = 0
        for key in keys:
            rows = slice(start, start + len(tables[key]))
            start = rows.stop
            estimate = float(_combined(joined[rows].sum(axis=1)[None])[0])
            drawn = _combined(means[:, rows])
            drawn = drawn[np.isfinite(drawn)]
            if not math.isfinite(estimate) or not len(drawn):
                continue
            if spread is not None:
                drawn = spread(key, drawn, estimate)
            low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            # A ratio counts the questions with a denominator
            # above 0, a difference the fewer of both sides.
            n = int((joined[rows][1::2] > 0).sum(axis=1).min())
            p = _chance(drawn) if isinstance(measures[key], Difference) else None
            mean, low, high = (round(float(value), _DIGITS) for value in (estimate, low, high))
            results[key] = Interval(mean, low, high, n, p)
    return results


def group_intervals(
    measures: Mapping[K, Measure], groups: Mapping[str, Sequence[int]], *, seed: int
) -> dict[str, dict[K, dict[str, Any] | None]]:
    """Return the intervals of `measures` as JSON for each group of questions."""
    by_group = {group: intervals(measures, seed=seed, among=members) for group, members in groups.items()}
    return {group: {key: as_json(interval) for key, interval in by_key.items()} for group, by_key in by_group.items()}


def as_json(interval: Interval | None) -> dict[str, Any] | None:
    """Return an interval as JSON; only that of a difference has a `p`."""
    if interval is None:
        return None
    return {name: value for name, value in asdict(interval).items() if value is not None}


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return each p-value adjusted for how many there are (Benjamini and Hochberg, 1995, step-up).

    Of the differences with an adjusted value of at most 0.05, at most 5 % are
    expected to be chance, also for tests that depend positively on each other,
    as metrics of the same answers mostly do (Benjamini and Yekutieli, 2001).

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


def _table(measure: Measure, key: object) -> NDArray[np.float64]:
    """Return `[2 or 4, n]` numerators and denominators in turn, of both sides of a difference; NaN if unknown.

    The denominators of a column are 1. A question that one side of a difference lacks is unknown.
    """
    import numpy as np

    rows: list[Column] = []
    for side in [measure.first, measure.second] if isinstance(measure, Difference) else [measure]:
        rows += [side.part, side.whole] if isinstance(side, Ratio) else [side, [1.0] * len(side)]
    for row in rows:
        if not all(value is None or math.isfinite(value) for value in row):
            raise ValueError(f"a value of {key} is not finite; a missing one has to be None")
    table = np.array(rows, dtype=np.float64)
    return np.where(np.isnan(table).any(axis=0), np.nan, table)


def _chance(drawn: NDArray[np.float64]) -> float:
    """Return the two-sided achieved significance level of a difference from 0 (Efron and Tibshirani, 15.4)."""
    import numpy as np

    drawn = np.round(drawn, _DIGITS)  # a draw without any difference counts for both sides
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return min(1.0, round(2 * (beyond + 1) / (len(drawn) + 1), _DIGITS))


def _combined(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `[r]` values of a measure from `[r, 2 or 4]` means; not finite where a denominator is 0."""
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = means[:, ::2] / means[:, 1::2]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]


def _resampled_means(table: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """Return `[resamples, m]` means of resampled rows of `table`, `[n, m]`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    n = len(table)
    means = np.empty((resamples, table.shape[1]))
    chunk = max(1, _DRAWS_AT_ONCE // n)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n  # so that one count serves all rows
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means[start : start + rows] = counts.astype(np.float64) @ table / n
    return means
