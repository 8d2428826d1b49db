"""Curves and bars as SVG and PNG: the same numbers give the same bytes, with no display and no user style.

Matplotlib's `Figure` is used without `pyplot`, so nothing global is touched. Labels are text, never mathematics: a `$`
in a name stays a `$`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.text import one_line, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKERS = "osD^vPX*"
_MARKED = 24  # more points than this are drawn without markers
_LONGEST_LABEL = 48
_STYLE = {
    "svg.hashsalt": "reasonrag",  # ids in an SVG are random otherwise
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. `x` and `y` are `[T]`; `low` and `high`, `[T]` too, bound a band around it. NaN leaves a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"line {self.label!r} has one bound of a band; give low and high, or neither")
        if any(len(values) != len(self.x) for values in (self.y, self.low, self.high) if values is not None):
            raise ValueError(f"line {self.label!r} has columns of different lengths")


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from 0 to `mean` with its interval; bars of one `label` share a colour, bars of one `group` a place."""

    label: str
    group: str
    mean: float
    low: float | None = None
    high: float | None = None


def save_panels(stem: Path, panels: Sequence[Panel]) -> list[Path]:
    """Write panels side by side as `stem.svg` and `stem.png`; returns both paths.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError("no panel to draw")
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    with _figure(4.2 * columns, 3.2 * rows) as figure:
        for number, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, columns, number), panel)
        return _save(figure, stem)


def save_bars(stem: Path, bars: Sequence[Bar], *, title: str, x_label: str) -> list[Path]:
    """Write horizontal bars, groups from the top in the order given, as `stem.svg` and `stem.png`.

    Raises:
        ValueError: there is no bar.
    """
    if not bars:
        raise ValueError("no bar to draw")
    groups = list(dict.fromkeys(bar.group for bar in bars))
    labels = list(dict.fromkeys(bar.label for bar in bars))
    with _figure(7.0, 1.2 + len(groups) * (0.14 + 0.2 * len(labels))) as figure:
        axes = figure.add_subplot(1, 1, 1)
        height = 0.8 / len(labels)
        for bar in bars:
            place = labels.index(bar.label)
            y = groups.index(bar.group) + (place - (len(labels) - 1) / 2) * height
            axes.barh(y, bar.mean, height=0.9 * height, color=_COLOURS[place % len(_COLOURS)])
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [y, y], color="#333333", linewidth=1.2)
        axes.set_yticks(range(len(groups)), [_text(group) for group in groups], parse_math=False)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(_text(title), parse_math=False)
        axes.set_xlabel(_text(x_label), parse_math=False)
        if len(labels) > 1:
            _legend(axes, labels, [_COLOURS[i % len(_COLOURS)] for i in range(len(labels))], beside=True)
        return _save(figure, stem)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(panel.lines))]
    for number, (line, colour) in enumerate(zip(panel.lines, colours, strict=True)):
        marker = _MARKERS[number % len(_MARKERS)] if len(line.x) <= _MARKED else ""
        axes.plot(line.x, line.y, color=colour, marker=marker, markersize=4, linewidth=1.4)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    if all(float(x).is_integer() for line in panel.lines for x in line.x if math.isfinite(x)):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if not any(len(line.x) for line in panel.lines):
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
    axes.set_title(_text(panel.title), parse_math=False)
    axes.set_xlabel(_text(panel.x_label), parse_math=False)
    axes.set_ylabel(_text(panel.y_label), parse_math=False)
    if len(panel.lines) > 1:
        _legend(axes, [line.label for line in panel.lines], colours)


def _legend(axes: Axes, labels: Sequence[str], colours: Sequence[str], *, beside: bool = False) -> None:
    """Where it hides least; `beside` the axes where bars may fill them."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=3) for colour in colours]
    # Matplotlib leaves out labels that start with "_", so the texts are set afterwards.
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if beside else {}
    legend = axes.legend(handles, [f"line {i}" for i in range(len(labels))], fontsize="small", **place)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(_text(label))


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of so many inches under our style alone, whatever a user's matplotlibrc says."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):
        yield Figure(figsize=(width, height), dpi=150)


def _save(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Once, by hand: a figure that knows of a layout is laid out and drawn anew, twice for every format.
    ConstrainedLayoutEngine().execute(figure)
    stem.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    paths = []
    for kind, words in metadata.items():
        image = io.BytesIO()
        figure.savefig(image, format=kind, metadata=words)
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        temporary = stem.with_name(f".{stem.name}.{kind}.{os.getpid()}.tmp")
        temporary.write_bytes(image.getvalue())
        temporary.replace(paths[-1])
    return paths


def _text(text: str) -> str:
    """A label: one line, nothing hidden in it, not too long."""
    line = printable(one_line(text))
    return line if len(line) <= _LONGEST_LABEL else f"{line[: _LONGEST_LABEL - 1]}…"
