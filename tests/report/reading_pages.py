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
        self._in_script = False
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.data += data
        else:
            self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of the elements of this name that have these ones."""
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]

    @property
    def details(self) -> dict[str, Any]:
        """What the page's script reads."""
        found: dict[str, Any] = json.loads(self.data)
        return found


def listed(report: Path) -> list[list[Any]]:
    """Rows of the list of questions, from the files that the first page names."""
    (table,) = Page(report / "index.html").all("table", id="list")
    rows: list[list[Any]] = []
    for name in json.loads(table["data-scripts"] or ""):
        script = (report / name).read_text(encoding="utf-8")
        rows += json.loads(script.removeprefix("registerQuestions(").removesuffix(");\n"))
    return rows
