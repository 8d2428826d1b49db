"""Curves and intervals to the geometry that the templates draw as SVG: places, ticks, and words for who cannot see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reasonrag.core.plots import Line, Panel
from reasonrag.report.site import shortened

WIDTH, HEIGHT = 480, 240  # of a chart, in SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 40
_MARKED = 30  # points; more of them are drawn without a mark each
_MOST_LINES = 6  # of one chart; a panel of more is drawn as a chart a line
_MOST_ROWS = 200  # of the table of a chart's numbers
_LABEL_COLUMNS = 48


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis and what it says."""

    place: float
    label: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One line as drawn; `number` picks its colour and dashes, `told` says its course in words."""

    label: str
    number: int
    path: str
    marks: list[tuple[float, float, str]]
    told: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One pair of axes. `rows` are its numbers by x, a column a curve; `every` of them is shown, 1 being all."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    rows: list[tuple[str, list[float | None]]]
    every: int

    @property
    def told(self) -> str:
        """The chart in words."""
        return " ".join(curve.told for curve in self.curves)


def charts(panels: Sequence[Panel]) -> tuple[list[Chart], dict[str, list[Chart]]]:
    """A chart of each panel; those of too many lines, whose scales differ, by title with a chart a line."""
    few = [panel for panel in panels if len(panel.lines) <= _MOST_LINES]
    many = [panel for panel in panels if panel not in few]
    return [chart(panel) for panel in few], {panel.title: [chart(part) for part in _parts(panel)] for panel in many}


def _parts(panel: Panel) -> Iterator[Panel]:
    for line in panel.lines:
        yield Panel(shortened(line.label, _LABEL_COLUMNS), panel.x_label, panel.y_label, (line,))


def chart(panel: Panel) -> Chart:
    """Places for everything in a panel; points that are no numbers are left out."""
    lines = [(line.label, found) for line in panel.lines if (found := _points(line))]
    points = [point for _, of in lines for point in of]
    x_scale = _Scale([x for x, _ in points], _LEFT + 8, WIDTH - _RIGHT)
    y_scale = _Scale([y for _, y in points], HEIGHT - _BOTTOM, _TOP, margin=True)
    rows = _rows([of for _, of in lines])
    every = math.ceil(len(rows) / _MOST_ROWS) or 1
    return Chart(
        title=panel.title,
        x_label=panel.x_label,
        y_label=panel.y_label,
        curves=[_curve(n, label, of, x_scale, y_scale) for n, (label, of) in enumerate(lines)],
        x_ticks=x_scale.ticks(whole=all(x.is_integer() for x, _ in points)),
        y_ticks=y_scale.ticks(),
        rows=rows[::every],
        every=every,
    )


def _points(line: Line) -> list[tuple[float, float]]:
    places = ((float(x), float(y)) for x, y in zip(line.x, line.y, strict=True))
    return [(x, y) for x, y in places if math.isfinite(x) and math.isfinite(y)]


def _curve(number: int, label: str, points: list[tuple[float, float]], x: _Scale, y: _Scale) -> Curve:
    places = [(x.place(a), y.place(b)) for a, b in points]
    marked = places if len(places) <= _MARKED else []
    (start, first), (end, last) = points[0], points[-1]
    low, high = min(value for _, value in points), max(value for _, value in points)
    label = shortened(label, _LABEL_COLUMNS)
    return Curve(
        label=label,
        number=number % _MOST_LINES,
        path="M" + "L".join(f"{a:g} {b:g}" for a, b in places),
        marks=[(*place, f"{label}, {a:g}: {b:.4g}") for place, (a, b) in zip(marked, points, strict=False)],
        told=f"{label}: {first:.4g} at {start:g}, {last:.4g} at {end:g}, lowest {low:.4g}, highest {high:.4g}.",
    )


def _rows(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[str, list[float | None]]]:
    columns = [dict(line) for line in lines]
    return [(f"{x:g}", [column.get(x) for column in columns]) for x in sorted({x for line in columns for x in line})]


_NOTHING = 1e-290  # a range below it cannot be divided into ticks


class _Scale:
    """Values to places between `start` and `end`."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, margin: bool = False) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = (high - low) * 0.06 if margin else 0.0
        size = max(abs(low), abs(high))
        if high - low <= max(1e-7 * size, _NOTHING):  # the same, but for rounding
            room = size / 2 if size > _NOTHING else 0.5
        self.low, self.high = low - room, high + room
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self, *, whole: bool = False) -> list[Tick]:
        return [Tick(self.place(value), label) for value, label in ticks(self.low, self.high, whole=whole)]


def ticks(low: float, high: float, *, most: int = 6, whole: bool = False) -> list[tuple[float, str]]:
    """Round numbers within `[low, high]`, 1, 2 or 5 times a power of ten apart, with the digits that tell them apart.

    >>> ticks(0.0, 1.0)
    [(0.0, '0.0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1.0')]
    >>> ticks(1, 4, whole=True)
    [(1.0, '1'), (2.0, '2'), (3.0, '3'), (4.0, '4')]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * power) <= most)
    step = max(step, 1.0) if whole else step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    # 1e-9: the ends of the range are ticks although they fall short of one by rounding.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    plain = digits <= 6 and max(abs(low), abs(high)) < 1e6
    significant = max(1, digits + math.ceil(math.log10(max(abs(low), abs(high)))))
    values = [float(f"{n * step:.12g}") for n in range(first, last + 1)]
    return [(value, f"{value:.{digits}f}" if plain else f"{value:.{significant}g}") for value in values]


@dataclass(frozen=True, slots=True)
class Whisker:
    """A mean with its interval, drawn on a scale from 0 to 1; places are in percent of the width."""

    label: str
    number: int
    low: float
    mean: float
    high: float
    told: str


def whiskers(values: Sequence[tuple[str, float, float, float]]) -> list[Whisker]:
    """A whisker for each (label, low, mean, high), all of them in [0, 1]."""
    return [
        Whisker(
            label=shortened(label, _LABEL_COLUMNS),
            number=number % _MOST_LINES,
            low=round(100 * low, 2),
            mean=round(100 * mean, 2),
            high=round(100 * high, 2),
            told=f"{mean:.3f} [{low:.3f}, {high:.3f}]",
        )
        for number, (label, low, mean, high) in enumerate(values)
    ]
