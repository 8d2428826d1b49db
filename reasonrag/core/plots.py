"""Curves and bars as SVG and PNG images. Equal numbers give equal bytes.

Matplotlib's `Figure` is used without `pyplot`, so no display is needed, nothing global is touched and no
user style applies. Labels are text, never mathematics: a `$` in a name stays a `$`.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reasonrag.core.text import one_line, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_MARKERS = 24  # a line with more points is drawn without markers
_LONGEST_LABEL = 48
_STYLE = {
    "svg.hashsalt": "reasonrag",  # ids in an SVG are random otherwise
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. `x` and `y` are `[T]`; `low` and `high`, `[T]` too, bound a band around it. NaN leaves a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes with its title, its labels and its curves."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from 0 to `mean` with its interval. Bars of one `label` share a colour, bars of one `group` a tick."""

    label: str
    group: str
    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars under a title, groups from the top in the order given."""

    title: str
    x_label: str
    bars: tuple[Bar, ...]


def images(charts: Sequence[Panel | BarChart], kinds: Collection[str] = ("svg", "png")) -> dict[str, bytes]:
    """Return an image of charts side by side in each format; `storage.files.save_charts` writes both.

    They are drawn in one style for colour-blind readers, not in that of a user's matplotlibrc.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    columns = min(len(charts), 3)
    chart_rows = -(-len(charts) // columns)
    drawn = {}
    with matplotlib.style.context(["default", "tableau-colorblind10", _STYLE]):
        figure = Figure(dpi=150, layout="constrained")
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(chart_rows, columns, number)
            width, height = _draw_panel(axes, chart) if isinstance(chart, Panel) else _draw_bars(axes, chart.bars)
            axes.set_title(_label(chart.title))
            axes.set_xlabel(_label(chart.x_label))
            if (labels := len(axes.get_legend_handles_labels()[0])) > 1:
                # Bars may fill their axes, and many lines a legend, which stands outside then.
                is_outside = isinstance(chart, BarChart) or labels > 7
                outside = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if is_outside else {}
                axes.legend(fontsize="small", **outside)
        # The size follows from the charts: bars need a line each, curves do not.
        figure.set_size_inches(width * columns, height * chart_rows)
        for kind in kinds:
            # Without dates and versions: the same numbers have to give the same bytes.
            metadata: dict[str, Any] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata=metadata)
            drawn[kind] = image.getvalue()
    return drawn


def _draw_bars(axes: Axes, bars: Sequence[Bar]) -> tuple[float, float]:
    """Draw the bars; return the size of the chart in inches."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    labels = list(dict.fromkeys(bar.label for bar in bars))
    height = 0.8 / len(labels)
    for index, label in enumerate(labels):
        same_label = [bar for bar in bars if bar.label == label]
        heights = [groups.index(bar.group) + (index - (len(labels) - 1) / 2) * height for bar in same_label]
        axes.barh(heights, [bar.mean for bar in same_label], 0.9 * height, color=f"C{index}", label=_label(label))
        for bar, middle in zip(same_label, heights, strict=True):
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [middle, middle], color="black", linewidth=1.2)
    axes.set_yticks(range(len(groups)), list(map(_label, groups)))
    axes.invert_yaxis()
    return 7.0, 1.2 + len(groups) * (0.14 + 0.2 * len(labels))


def _draw_panel(axes: Axes, panel: Panel) -> tuple[float, float]:
    """Draw the curves; return the size of the chart in inches."""
    for number, line in enumerate(panel.lines):
        # Colours alone do not tell the lines apart.
        marker = "osD^vPX*<>"[number % 10] if len(line.x) <= _MOST_MARKERS else ""
        dashes = ("-", "--", ":", "-.")[number % 4]
        color = f"C{number}"
        axes.plot(line.x, line.y, color, linestyle=dashes, marker=marker, markersize=4, label=_label(line.label))
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.set_ylabel(_label(panel.y_label))
    return 4.2, 3.2


def _label(text: str) -> str:
    """Return a label on one line, without hidden characters and not too long."""
    # Matplotlib leaves out labels that start with "_".
    line = printable(one_line(text)).lstrip("_")
    return line if len(line) <= _LONGEST_LABEL else f"{line[: _LONGEST_LABEL - 1]}…"
