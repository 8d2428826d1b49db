"""Charts of a page: the SVG of `core.plots`, a description in words, and the numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from markupsafe import Markup

from reasonrag.core.plots import Bar, BarChart, Line, Panel, chart_svg
from reasonrag.report.site import shortened

_MOST_LINES = 6  # a panel with more lines becomes one chart per line, because their scales differ
_MOST_ROWS = 200  # of the table of numbers
_LABEL_COLUMNS = 48


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
        for line_number, line in enumerate(panel.lines, 1):
            part = Panel(shortened(line.label, _LABEL_COLUMNS), panel.x_label, panel.y_label, (line,))
            split[panel.title].append(chart(part, f"chart-{number}-{line_number}"))
    return whole, split


def chart(panel: Panel, name: str) -> Chart:
    """Draw a panel, without points that are not finite; `name` is unique within the page."""
    lines = []
    descriptions = []
    columns: list[dict[float, float]] = []  # of each line, the values by their x
    for line in panel.lines:
        points = [(float(x), float(y)) for x, y in zip(line.x, line.y, strict=True) if isfinite(x) and isfinite(y)]
        if not points:
            continue
        label = shortened(line.label, _LABEL_COLUMNS)
        x_values, y_values = zip(*points, strict=True)
        lines.append(Line(label, x_values, y_values))
        columns.append(dict(points))
        (start, first), (end, last) = points[0], points[-1]
        course = f"{first:.4g} at {start:g}, {last:.4g} at {end:g}"
        descriptions.append(f"{label}: {course}, lowest {min(y_values):.4g}, highest {max(y_values):.4g}.")
    if not lines:
        return Chart(panel.title, panel.x_label, panel.y_label, None, [], [])
    svg = chart_svg(
        Panel(panel.title, panel.x_label, panel.y_label, tuple(lines)),
        name=name,
        description=" ".join([*descriptions, "The numbers are in the table below."]),
    )
    all_x = sorted({x for column in columns for x in column})
    every = ceil(len(all_x) / _MOST_ROWS)
    rows = [(f"{x:g}", [column.get(x) for column in columns]) for x in all_x[::every]]
    labels = [line.label for line in lines]
    return Chart(panel.title, panel.x_label, panel.y_label, Markup(svg), labels, rows, every)


def interval_chart(title: str, name: str, intervals: Sequence[tuple[str, float, float, float]]) -> Chart:
    """Draw means with their intervals.

    Args:
        title: of the chart.
        name: unique within the page.
        intervals: label, low, mean and high of each bar.
    """
    bars = [Bar("mean", shortened(label, _LABEL_COLUMNS), mean, low, high) for label, low, mean, high in intervals]
    return bar_chart(BarChart(title, "mean and 95 % interval", tuple(bars)), name)


def bar_chart(chart: BarChart, name: str) -> Chart:
    """Draw bars with their intervals; `name` is unique within the page."""
    labels = {bar.label for bar in chart.bars}
    descriptions = []
    for bar in chart.bars:
        what = bar.group if len(labels) == 1 else f"{bar.group}, {bar.label}"
        descriptions.append(f"{what}: {bar.mean:.3f} [{bar.low:.3f}, {bar.high:.3f}].")
    svg = chart_svg(chart, name=name, description=" ".join(descriptions))
    return Chart(chart.title, "", "", Markup(svg), [], [])
