from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from reasonrag.core.plots import Bar, BarChart, Line, Panel
from reasonrag.storage.files import save_charts

RISING = Line("policy", (1, 2, 3), (0.1, 0.2, 0.3), (0.0, 0.1, 0.2), (0.2, 0.3, 0.4))
BARS = (Bar("base", "all", 0.2, 0.1, 0.3), Bar("tuned", "all", 0.4, 0.3, 0.5), Bar("tuned", "bridge", 0.3))


def panel(*lines: Line, title: str = "EM over steps") -> Panel:
    return Panel(title, "steps", "EM", lines)


def words(svg) -> list[str]:
    return [e.text for e in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def draw(kind: str, stem):
    if kind == "panels":
        return save_charts(stem, [panel(RISING), panel(RISING, Line("other", (1, 2), (0.5, float("nan"))))])
    return save_charts(stem, [BarChart("EM", "exact match", BARS)])


@pytest.mark.parametrize("kind", ["panels", "bars"])
def test_the_same_numbers_give_the_same_bytes(kind, tmp_path):
    once, again = draw(kind, tmp_path / "a"), draw(kind, tmp_path / "b")
    assert [path.name for path in once] == ["a.svg", "a.png"]
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    assert once[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]


@pytest.mark.parametrize("label", ["cost $1$ $\\frac", "<b>&amp;", "\ufffe", "line\nbreak \x1b[31m\u202e", "x" * 200])
def test_any_label_can_be_drawn_and_stays_text(label, tmp_path):
    lines = (Line(label, (1, 2), (1, 2)), Line("other", (1, 2), (2, 1)))
    svg, _ = save_charts(tmp_path / "a", [panel(*lines, title=label)])
    shown = label.replace("\n", " ").replace("\x1b", "\ufffd").replace("\u202e", "\ufffd").replace("\ufffe", "\ufffd")
    shown = shown if len(shown) <= 48 else f"{shown[:47]}…"
    assert words(svg).count(shown) == 2  # title and legend
    svg, _ = save_charts(tmp_path / "b", [BarChart(label, label, (Bar(label, label, 1.0), Bar("o", label, 0.5)))])
    assert words(svg).count(shown) == 4


def test_every_panel_and_line_is_named(tmp_path):
    panels = [panel(RISING, Line("second", (1,), (1,)), title=f"panel {i}") for i in range(5)]
    svg, _ = save_charts(tmp_path / "a", panels)
    found = words(svg)
    assert [found.count(f"panel {i}") for i in range(5)] == [1] * 5
    assert (found.count("policy"), found.count("second"), found.count("steps")) == (5, 5, 5)
