"""Cells and tables of the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def interval_text(found: Mapping[str, float] | None, *, sign: bool = False) -> str:
    """A mean with its interval.

    >>> interval_text({"mean": 0.5, "low": 0.25, "high": 0.75})
    '0.500 [0.250, 0.750]'
    """
    if found is None:
        return "unknown"
    form = "{:+.3f} [{:+.3f}, {:+.3f}]" if sign else "{:.3f} [{:.3f}, {:.3f}]"
    return form.format(found["mean"], found["low"], found["high"])


def points_text(found: Mapping[str, float]) -> str:
    """A difference of shares in points; bold where its interval excludes 0.

    >>> points_text({"mean": 0.05, "low": 0.01, "high": 0.09})
    '**+5.0 [+1.0, +9.0]**'
    """
    return bold("{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * found[name] for name in ("mean", "low", "high"))), found)


def bold(text: str, found: Mapping[str, float]) -> str:
    """Bold where the interval excludes 0."""
    return text if found["low"] <= 0 <= found["high"] else f"**{text}**"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A Markdown table, a line at a time."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
