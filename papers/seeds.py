"""Intervals over questions and training seeds.

Several seeds answer the same questions: two crossed factors (Owen, The pigeonhole bootstrap, 2007). Three seeds are too
few to resample, so their part is a normal draw with the standard error of their estimates, and the sum is spread out
like Student's t with Satterthwaite's degrees of freedom (An approximate distribution of estimates of variance
components, 1946). One seed leaves the bootstrap over questions. The part of a question that shows with
one seed only is counted in both parts, so the interval is slightly wide, as Owen's is; docs/evaluation.md has how often
it holds the truth.

Draws can be repeated: `numpy.random.default_rng([seed, 1])` gives the normal draws, then the chi-squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reasonrag.core import bootstrap
from reasonrag.core.bootstrap import RESAMPLES, Column, Difference, Interval, Measure, Ratio

Cells = NDArray[np.float64]  # `[seeds, 1 or 2 sides, 2, n]` numerators and denominators; NaN if unknown


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """The same measure of the same questions with each of several training seeds.

    A mean is over all attempts that have a value, so a question counts as often as seeds answered it; the sums of a
    ratio are over seeds too.
    """

    by_seed: Sequence[Measure]


def intervals(
    measures: Mapping[str, OverSeeds], *, seed: int, among: Sequence[int] | None = None, resamples: int = RESAMPLES
) -> dict[str, Interval | None]:
    """Return the mean, ratio or difference of each measure over all its attempts, with its interval.

    The arguments are those of `core.bootstrap.intervals`. No interval goes beyond the values of single attempts.
    """
    cells = {key: _cells(measure) for key, measure in measures.items()}

    def spread(key: str, drawn: Cells, estimate: float) -> Cells:
        cell = cells[key] if among is None else cells[key][..., list(among)]
        return _with_seeds(drawn, estimate, cell, seed)

    pooled = {key: _pooled(cell) for key, cell in cells.items()}
    return bootstrap.intervals(pooled, seed=seed, among=among, resamples=resamples, spread=spread)


def estimates_by_seed(measure: OverSeeds) -> list[float | None]:
    """Return the mean, ratio or difference with each seed alone; None if it has no values."""
    return [_estimate(cell) for cell in _cells(measure)]


def _cells(measure: OverSeeds) -> Cells:
    by_seed = []
    for one_seed in measure.by_seed:
        sides = [one_seed.first, one_seed.second] if isinstance(one_seed, Difference) else [one_seed]
        by_seed.append([_rows(side) for side in sides])
    cells = np.array(by_seed, dtype=np.float64)
    # A question that one side lacks with a seed is unknown with that seed.
    return np.where(np.isnan(cells).any(axis=(1, 2), keepdims=True), np.nan, cells)


def _rows(side: Column | Ratio) -> list[Column]:
    return [side.part, side.whole] if isinstance(side, Ratio) else [side, [1.0] * len(side)]


def _pooled(cell: Cells) -> Measure:
    """Return a measure of the sums over the seeds; a question that no seed knows is unknown."""
    unknown = np.isnan(cell[:, 0, 0]).all(axis=0)
    sides = []
    for part, whole in np.where(unknown, np.nan, np.nansum(cell, axis=0)):
        rows = [[None if math.isnan(value) else value for value in row.tolist()] for row in (part, whole)]
        sides.append(Ratio(*rows))
    return Difference(*sides) if len(sides) == 2 else sides[0]


def _estimate(cell: Cells) -> float | None:
    """Return a measure with one seed, given `[sides, 2, n]` cells."""
    sums = np.nansum(cell, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = sums[:, 0] / sums[:, 1]
    estimate = float(values[0] - values[1]) if len(values) == 2 else float(values[0])
    return estimate if math.isfinite(estimate) else None


def _with_seeds(drawn: Cells, estimate: float, cell: Cells, seed: int) -> Cells:
    """Return draws over questions and seeds, given `[r]` draws over questions alone."""
    known = [value for value in map(_estimate, cell) if value is not None]
    error = float(np.var(known, ddof=1)) / len(known) if len(known) > 1 else 0.0
    if not error:
        return drawn
    freedom = (len(known) - 1) * ((error + drawn.var()) / error) ** 2
    rng = np.random.default_rng([seed, 1])
    deviations = drawn - estimate + math.sqrt(error) * rng.standard_normal(len(drawn))
    deviations *= np.sqrt(freedom / rng.chisquare(freedom, len(drawn)))
    wholes = cell[:, :, 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        values = cell[:, :, 0] / wholes
    if len(cell[0]) == 2 and bool(((wholes == 1) | np.isnan(wholes)).all()):
        values = values[:, :1] - values[:, 1:]  # one attempt a question on each side: their difference
    low, high = np.nanmin(values, axis=(0, 2)), np.nanmax(values, axis=(0, 2))  # `[sides]`
    if len(low) == 2:
        low, high = low[:1] - high[1:], high[:1] - low[1:]
    return np.clip(estimate + deviations, low[0], high[0])
