"""Foreign text for a page: what cannot be seen or turns the reading direction is shown as `�`."""

from __future__ import annotations

import unicodedata
from typing import Any

from reasonrag.core.text import one_line, printable


def visible(value: Any) -> Any:
    """The value with every string in it, keys too, made printable; lines and tabs stay.

    >>> visible({"a": ["b\\u202ec", 1]})
    {'a': ['b�c', 1]}
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {visible(key): visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


def shortened(text: str, columns: int) -> str:
    """The text on one line of at most `columns` columns, where a wide character fills two.

    >>> shortened("Who was\\nthe captain?", 12)
    'Who was the…'
    >>> shortened("東京都庁", 6)
    '東京…'
    """
    line = one_line(visible(text[: 4 * columns]))  # blanks that are squeezed leave room for what follows
    if len(text) <= 4 * columns and _columns(line) <= columns:
        return line
    line = line[:columns]
    while _columns(line) > columns - 1:
        line = line[:-1]
    return line.rstrip() + "…"


def _columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)
