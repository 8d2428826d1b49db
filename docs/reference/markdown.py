"""What the reference pages have in common."""

from __future__ import annotations

NOTE = "<!-- Written by `python -m docs.reference` from the code; do not edit by hand. -->\n"


def code(text: str) -> str:
    """A name as code; nothing of nothing."""
    return f"`{text}`" if text else ""


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
