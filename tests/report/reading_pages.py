"""A page as a browser's parser meets it, with the standard library alone."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Elements with their attributes, the text outside of scripts, and the data inside of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data = ""
        self.rows: list[list[str]] = []  # of all tables, the text of their cells
        self._in_script = self._in_cell = False
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.data += data
        else:
            self.text += data
            if self._in_cell:
                self.rows[-1][-1] += data.strip()

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of the elements of this name that have these ones."""
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]

    @property
    def details(self) -> dict[str, Any]:
        """What the page's script reads."""
        found: dict[str, Any] = json.loads(self.data)
        return found


def listed(report: Path, page: str = "index.html") -> list[list[Any]]:
    """Rows of the list of a page, from the files that it names: cells, then the page and the marks."""
    (table,) = Page(report / page).all("table", id="list")
    return [row for name in json.loads(table["data-scripts"] or "") for row in scripted(report / name)]


def scripted(file: Path, function: str = "registerRows") -> list[Any]:
    """What a file of `data/` calls the function with."""
    items: list[Any] = json.loads(file.read_text(encoding="utf-8").removeprefix(f"{function}(").removesuffix(");\n"))
    return items
