"""The parts that all reports share: files of a site, inert rendering, lists in parts, texts stored once per page.

OUT/
├── index.html              settings, metrics, the list of pages
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
from typing import TYPE_CHECKING, Any, TypeVar

from reasonrag.core.errors import RunError
from reasonrag.core.text import one_line, printable
from reasonrag.storage.files import claim_folder, lock, write_text
from reasonrag.storage.parquet import Row

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

TITLE_COLUMNS = 80  # of a question in a page's title
_ROWS_PER_FILE = 500
_CELL_COLUMNS = 300
_MARKERS = ("report.css", "list.js")  # both mark a folder as a report; a site by hand may have one of them
_ASSETS = (*_MARKERS, "page.js")
_FOLDERS = ("questions", "groups")


class Site:
    """The pages of one report while they are written, see `open_site`."""

    def __init__(self, out: Path, folder: str, assets: Sequence[str]) -> None:
        self.out = out
        self.folder = folder
        (out / "index.html").unlink(missing_ok=True)
        for name in assets:
            (out / name).write_bytes((Path(__file__).parent / "templates" / name).read_bytes())
        old_pages = [page for name in _FOLDERS for page in (out / name).glob("[0-9]*.html")]
        for old in [*old_pages, *out.glob("data/*.js")]:
            old.unlink()
        for name in (folder, "data"):
            (out / name).mkdir(exist_ok=True)

    def page_name(self, number: int) -> str:
        """The file of a page by its number, from 0. Ids come from outside and never become file names."""
        return f"{self.folder}/{number:05d}.html"

    def write_page(self, number: int, template: str, *, last: bool, **values: Any) -> None:
        """Write a page of the folder, with links to its neighbours."""
        previous_page = f"{number - 1:05d}.html" if number else None
        next_page = None if last else f"{number + 1:05d}.html"
        text = render(template, root="../", previous=previous_page, next=next_page, **values)
        (self.out / self.page_name(number)).write_text(text, encoding="utf-8")

    def write_index(self, template: str, **values: Any) -> Path:
        """Write the first page; return its path."""
        index = self.out / "index.html"
        write_text(index, render(template, root="", **values))
        return index


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
    holds = all((out / name).is_file() for name in _MARKERS)
    claim_folder(out, "report", already_ours=holds, ignore=assets)
    with lock(out / ".lock"):
        yield Site(out, folder, assets)


class Listing:
    """The rows of a site's list, written in parts of `_ROWS_PER_FILE`.

    A row holds a value for each heading of the list, then its page, then its marks: the words that a filter looks for.
    Long texts are shortened, because all rows are in the browser's memory at once.
    """

    def __init__(self, site: Site) -> None:
        self.scripts: list[str] = []
        self._site = site
        self._rows: list[Sequence[Any]] = []

    def add(self, cells: Sequence[Any], page: str, marks: Sequence[str] = ()) -> None:
        """Append a row; a part is written whenever it is full."""
        self._rows.append([*map(_shortened_cell, cells), page, marks])
        if len(self._rows) == _ROWS_PER_FILE:
            self._flush()

    def close(self) -> list[str]:
        """Write the remaining rows; return the names of all parts."""
        if self._rows:
            self._flush()
        return self.scripts

    def _flush(self) -> None:
        name = f"data/rows-{len(self.scripts):03d}.js"
        values = json.dumps(visible(self._rows), ensure_ascii=False).replace("<", "\\u003c")
        (self._site.out / name).write_text(f"registerRows({values});\n", encoding="utf-8")
        self.scripts.append(name)
        self._rows = []


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


def with_last(items: Iterable[T]) -> Iterator[tuple[int, T, bool]]:
    """Yield each item with its number and whether it is the last.

    >>> list(with_last("ab"))
    [(0, 'a', False), (1, 'b', True)]
    """
    remaining = iter(items)
    for held in remaining:  # runs once: the inner loop takes the rest
        number = 0
        for following in remaining:
            yield number, held, False
            number, held = number + 1, following
        yield number, held, True


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors of the enclosed code, which looks up values of `file`, into a RunError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
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
