"""The parts that all reports share: files of a site, inert rendering, lists in parts, texts stored once per page.

OUT/
├── index.html              settings, metrics, the list of pages
├── pairs.html              of a run: the list of its pairs
├── questions/00000.html    one question, in the folder's order; `groups/` for a training run
├── data/rows-000.js        rows of the list: a page opened from disk may not fetch JSON, but may load a script
└── report.css, *.js

Every value that a template prints goes through `visible` and is escaped. The pages' Content-Security-Policy allows the
report's own files and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reasonrag.core.errors import RunError
from reasonrag.core.secrets import excerpt
from reasonrag.core.text import one_line, printable
from reasonrag.storage.files import write_text
from reasonrag.storage.folder import Folder
from reasonrag.storage.parquet import Row

if TYPE_CHECKING:
    from jinja2 import Environment

_TITLE_COLUMNS = 80  # of a question in a page's title
_ROWS_PER_FILE = 500
_CELL_COLUMNS = 300
_MARKERS = ("report.css", "list.js")  # both mark a folder as a report; a site by hand may have one of them
_ASSETS = (*_MARKERS, "page.js")
_FOLDERS = ("questions", "groups")


class ListRow(NamedTuple):
    """A row of the list on the first page; its number and its page are added when it is written.

    Attributes:
        cells: a value for each heading of the list after the number.
        marks: the words that a filter looks for.
        anchor: of the row's part in its page, with `#`.
    """

    cells: Sequence[Any]
    marks: Sequence[str] = ()
    anchor: str = ""


class Page(NamedTuple):
    """A page about one question: a row that describes it, other values of the template, and its rows of the list."""

    question: Row
    values: dict[str, Any]
    rows: Sequence[ListRow]


class DataFiles:
    """Items of a page in files, each a script that calls a function with a list of them.

    Attributes:
        names: of the files so far, from the first page.
        total: items so far.
    """

    def __init__(self, out: Path, name: str, *, per_file: int, function: str = "registerRows") -> None:
        self.names: list[str] = []
        self.total = 0
        self._out, self._name, self._per_file, self._function = out, name, per_file, function
        self._items: list[Any] = []

    def add(self, item: Any) -> None:
        """Add an item; it is written when its file is full, or by `close`."""
        self._items.append(item)
        self.total += 1
        if len(self._items) == self._per_file:
            self.close()

    def close(self) -> list[str]:
        """Write the items that are left; return the names of all files."""
        if self._items:
            self.names.append(f"data/{self._name}-{len(self.names):03d}.js")
            values = json.dumps(visible(self._items), ensure_ascii=False).replace("<", "\\u003c")
            (self._out / self.names[-1]).write_text(f"{self._function}({values});\n", encoding="utf-8")
            self._items = []
        return self.names


class Site:
    """The pages of one report while they are written, see `open_site`.

    Attributes:
        rows: of the list on the first page.
    """

    def __init__(self, out: Path, folder: str, assets: Sequence[str]) -> None:
        self.out = out
        self.folder = folder
        self.rows = DataFiles(out, "rows", per_file=_ROWS_PER_FILE)
        for name in ("index.html", "pairs.html"):
            (out / name).unlink(missing_ok=True)
        for name in assets:
            (out / name).write_bytes((Path(__file__).parent / "templates" / name).read_bytes())
        old_pages = [page for name in _FOLDERS for page in (out / name).glob("[0-9]*.html")]
        for old in [*old_pages, *out.glob("data/*.js")]:
            old.unlink()
        for name in (folder, "data"):
            (out / name).mkdir(exist_ok=True)

    def write_pages(self, template: str, pages: Iterable[Page]) -> None:
        """Write the pages of the folder, with links to their neighbours, and their rows of the list.

        Pages are named by their numbers: ids come from outside and never become file names.
        """
        remaining = iter(pages)
        page, number = next(remaining, None), 0
        while page is not None:
            following = next(remaining, None)
            name = f"{self.folder}/{number:05d}.html"
            text = render(
                template,
                root="../",
                previous=f"{number - 1:05d}.html" if number else None,
                next=f"{number + 1:05d}.html" if following else None,
                question=page.question,
                short_title=shortened(page.question["question"], _TITLE_COLUMNS),
                **page.values,
            )
            (self.out / name).write_text(text, encoding="utf-8")
            for row in page.rows:
                self.rows.add(list_row(self.rows.total, row, name))
            page, number = following, number + 1

    def write(self, name: str, template: str, **values: Any) -> Path:
        """Write a page beside the folder of the others; return its path."""
        write_text(self.out / name, render(template, root="", **values))
        return self.out / name


@contextlib.contextmanager
def open_site(out: Path, *, folder: str, scripts: Sequence[str]) -> Iterator[Site]:
    """Lock a report's folder and empty it for new pages.

    `index.html` is deleted first and written last, so a report that has it is complete.

    Args:
        out: the report's folder.
        folder: of the pages beside the first, one of `_FOLDERS`.
        scripts: files of `templates/` that these pages load beside those of all reports.

    Raises:
        RunError: `out` holds other files, or another process writes there.
    """
    assets = (*_ASSETS, *scripts)
    with Folder(out, "report", *_MARKERS, ignore=assets).locked():
        yield Site(out, folder, assets)


def list_row(number: int, row: ListRow, page: str) -> list[Any]:
    """Return a row of a list as `list.js` reads it. Long texts are shortened: all rows are in the browser at once."""
    return [number, *map(_shortened_cell, row.cells), page + row.anchor, row.marks]


def _shortened_cell(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _CELL_COLUMNS else shortened(value, _CELL_COLUMNS)
    return [_shortened_cell(item) for item in value] if isinstance(value, list | tuple) else value


class TextPool:
    """Stores each distinct item once, so that a page holds a text that many steps share one time.

    >>> pool = TextPool()
    >>> [pool.index({"role": role}) for role in ("system", "user", "system")], len(pool.items)
    ([0, 1, 0], 2)
    """

    def __init__(self) -> None:
        self.items: list[Row] = []
        self._indices: dict[str, int] = {}

    def index(self, item: Row) -> int:
        """Return the item's index in `items`, after adding it if it is new."""
        index = self._indices.setdefault(json.dumps(item, sort_keys=True), len(self.items))
        if index == len(self.items):
            self.items.append(item)
        return index

    def messages(self, prompt: Iterable[Row]) -> list[int]:
        """Return the indices of a prompt's messages."""
        return [self.index({"role": message["role"], "content": message["content"]}) for message in prompt]

    def passage(self, passage: Row) -> int:
        """Return the index of a passage, whatever its score."""
        return self.index({"id": passage["id"], "contents": passage["contents"]})


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors of the enclosed code, which looks up values of `file`, into a RunError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = f"{type(error).__name__}: {excerpt(str(error))}"
        raise RunError(
            f"{file} does not have the layout of this version of reasonrag ({reason}); it is damaged or was written by "
            "another version"
        ) from error


def render(template: str, **values: Any) -> str:
    """Render a template, every value escaped and visible."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("reasonrag.report", "templates"),
        autoescape=True,
        undefined=ChainableUndefined,  # a run of another version may lack some counts
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "number": number}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment


def _printed(value: Any) -> Any:
    """What a template prints for a value: a dash if it is missing, text made visible."""
    from jinja2 import Undefined
    from markupsafe import Markup

    if value is None or isinstance(value, Undefined):
        return "–"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def number(value: Any) -> Any:
    """Format a number for people: thousands separators from 1,000 on, four digits below; other values are unchanged.

    >>> number(12345), number(86399.6), number(0.123456), number(None)
    ('12,345', '86,400', '0.1235', None)
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if 1_000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def visible(value: Any) -> Any:
    """Replace characters that cannot be seen or turn the reading direction by `�`, in every string of a value.

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
    """Cut a text to one line of at most `columns` columns; a wide character fills two.

    >>> shortened("Who was\\nthe captain?", 12)
    'Who was the…'
    >>> shortened("東京都庁", 6)
    '東京…'
    """
    line = one_line(visible(text[: 4 * columns]))  # more than `columns`, because runs of blanks shrink to one
    if len(text) <= 4 * columns and _width(line) <= columns:
        return line
    line = line[:columns]
    while _width(line) > columns - 1:
        line = line[:-1]
    return line.rstrip() + "…"


def _width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)
