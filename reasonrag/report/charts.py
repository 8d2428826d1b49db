"""Charts of a page: the SVG of `core.plots`, a description in words, and the numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reasonrag.core.plots import Bar, Line, Panel, bars_svg, panel_svg
from reasonrag.report.site import shortened

_MOST_LINES = 6  # a panel with more lines becomes one chart per line, because their scales differ
_MOST_ROWS = 200  # of the table of numbers
_LABEL_COLUMNS = 48

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its numbers.

    Attributes:
        svg: the picture; None without any number.
        labels: `[L]` of the lines.
        rows: x, and `[L]` the value of each line there.
        every: one row out of so many is in `rows`.
    """

    title: str
    x_label: str
    y_label: str
    svg: Markup | None
    labels: list[str]
    rows: list[tuple[str, list[float | None]]]
    every: int = 1


def charts(panels: Sequence[Panel]) -> tuple[list[Chart], dict[str, list[Chart]]]:
    """Return a chart per panel, and for each panel of too many lines, by its title, a chart per line."""
    whole: list[Chart] = []
    split: dict[str, list[Chart]] = {}
    for number, panel in enumerate(panels, 1):
        if len(panel.lines) <= _MOST_LINES:
            whole.append(chart(panel, f"chart-{number}"))
            continue
        split[panel.title] = []
        for place, line in enumerate(panel.lines, 1):
            part = Panel(shortened(line.label, _LABEL_COLUMNS), panel.x_label, panel.y_label, (line,))
            split[panel.title].append(chart(part, f"chart-{number}-{place}"))
    return whole, split


def chart(panel: Panel, name: str) -> Chart:
    """Draw a panel, without points that are not finite; `name` is unique within the page."""
    labels: list[str] = []
    all_points: list[list[Point]] = []
    for line in panel.lines:
        if points := _points(line):
            labels.append(shortened(line.label, _LABEL_COLUMNS))
            all_points.append(points)
    if not labels:
        return Chart(panel.title, panel.x_label, panel.y_label, None, [], [])
    lines = []
    descriptions = []
    for label, points in zip(labels, all_points, strict=True):
        lines.append(Line(label, [x for x, _ in points], [y for _, y in points]))
        descriptions.append(_describe(label, points))
    svg = panel_svg(
        Panel(panel.title, panel.x_label, panel.y_label, tuple(lines)),
        name=name,
        description=" ".join([*descriptions, "The numbers are in the table below."]),
    )
    rows = _rows(all_points)
    every = math.ceil(len(rows) / _MOST_ROWS)
    return Chart(panel.title, panel.x_label, panel.y_label, Markup(svg), labels, rows[::every], every)


def interval_chart(title: str, name: str, intervals: Sequence[tuple[str, float, float, float]]) -> Chart:
    """Draw means with their intervals.

    Args:
        title: of the chart.
        name: unique within the page.
        intervals: label, low, mean and high of each bar.
    """
    bars = [Bar("mean", shortened(label, _LABEL_COLUMNS), mean, low, high) for label, low, mean, high in intervals]
    words = [f"{bar.group}: {bar.mean:.3f} [{bar.low:.3f}, {bar.high:.3f}]." for bar in bars]
    svg = bars_svg(bars, title=title, x_label="mean and 95 % interval", name=name, description=" ".join(words))
    return Chart(title, "", "", Markup(svg), [], [])


def _points(line: Line) -> list[Point]:
    points = ((float(x), float(y)) for x, y in zip(line.x, line.y, strict=True))
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _describe(label: str, points: Sequence[Point]) -> str:
    (start, first), (end, last) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    return f"{label}: {first:.4g} at {start:g}, {last:.4g} at {end:g}, lowest {low:.4g}, highest {high:.4g}."


def _rows(lines: Sequence[Sequence[Point]]) -> list[tuple[str, list[float | None]]]:
    columns = [dict(points) for points in lines]
    steps = sorted({x for column in columns for x in column})
    return [(f"{x:g}", [column.get(x) for column in columns]) for x in steps]
