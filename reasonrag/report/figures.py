"""Numbers to figures: shares, spreads and histograms, with the geometry that the templates draw as SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

WIDTH, HEIGHT = 480, 190  # of a histogram, in SVG units
_LEFT, _TOP, _BOTTOM = 44, 16, 40
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One category: its count, its share of all, and the length of its bar relative to the longest, in [0, 1]."""

    label: str
    count: int
    share: float
    length: float


@dataclass(frozen=True, slots=True)
class Spread:
    """What the paper's Table 1 gives of a quantity."""

    mean: float
    minimum: float
    median: float
    maximum: float


@dataclass(frozen=True, slots=True)
class Column:
    """One bin `[low, high)` of a histogram (the last one includes `high`) and where it is drawn.

    `tick` is empty where a label would touch its neighbour's.
    """

    label: str
    tick: str
    count: int
    x: float
    y: float
    width: float
    height: float


def bars(counts: Mapping[str, int]) -> list[Bar]:
    """A bar for each category, in the order given.

    >>> bars({"query": 3, "answer": 1})[1]
    Bar(label='answer', count=1, share=0.25, length=0.3333333333333333)
    """
    total, longest = sum(counts.values()) or 1, max(counts.values(), default=0) or 1
    return [Bar(label, count, count / total, count / longest) for label, count in counts.items()]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, minimum, median and maximum; None of nothing.

    >>> spread([1, 2, 6])
    Spread(mean=3.0, minimum=1, median=2, maximum=6)
    """
    return Spread(fmean(values), min(values), median(values), max(values)) if values else None


def margin_histogram(margins: Sequence[float], *, bins: int = 20) -> list[Column]:
    """Rewards' differences over [0, 1] in equal bins."""
    width = 1 / bins
    # 1e-9: 0.15 is the third edge of twentieths, and 0.15 / 0.05 falls short of 3 by rounding.
    counts = Counter(min(int(margin / width + 1e-9), bins - 1) for margin in margins)
    edges = [f"{i * width:.2f}" for i in range(bins + 1)]
    return _columns([(f"{edges[i]} to {edges[i + 1]}", edges[i], counts[i]) for i in range(bins)])


def whole_number_histogram(values: Sequence[int], *, bins: int = 20) -> list[Column]:
    """Counts of whole numbers: a bin for each, or for several in a row where there would be more than `bins`."""
    if not values:
        return []
    low, high = min(values), max(values)
    width = math.ceil((high - low + 1) / bins)
    counts = [0] * math.ceil((high - low + 1) / width)
    for value in values:
        counts[(value - low) // width] += 1
    starts = [low + i * width for i in range(len(counts))]
    labels = [str(start) if width == 1 else f"{start} to {start + width - 1}" for start in starts]
    return _columns(list(zip(labels, map(str, starts), counts, strict=True)))


def _columns(bins: Sequence[tuple[str, str, int]]) -> list[Column]:
    """Bins as (label, tick, count) with their rectangles."""
    if not any(count for *_, count in bins):
        return []
    highest = max(count for *_, count in bins)
    step, room = (WIDTH - _LEFT) / len(bins), HEIGHT - _TOP - _BOTTOM
    every = math.ceil(len(bins) / _MOST_TICKS)
    columns = []
    for i, (label, tick, count) in enumerate(bins):
        height = room * count / highest
        columns.append(
            Column(
                label=label,
                tick=tick if i % every == 0 else "",
                count=count,
                x=round(_LEFT + i * step, 2),
                y=round(_TOP + room - height, 2),
                width=round(step * 0.86, 2),
                height=round(height, 2),
            )
        )
    return columns
