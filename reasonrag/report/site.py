"""What the reports of all kinds of folders share: the pages' files, how they are rendered, and lists in parts.

OUT/
├── index.html              what was done, what came out, the list of pages
├── questions/00000.html    one question, in the folder's order; `groups/` for a training
├── data/rows-000.js        rows of the list: a page opened from disk may not fetch JSON, but may load a script
└── report.css, *.js

Everything that a template prints goes through `visible` and is escaped; the pages' policy (CSP) allows the report's own
files and nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reasonrag.core.errors import RunError
from reasonrag.core.text import one_line
from reasonrag.report.visible import shortened, visible
from reasonrag.storage.runs import claim_folder, lock, write_text

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

TITLE_COLUMNS = 80  # of a question in a page's title
_ROWS_PER_FILE = 500
_CELL_COLUMNS = 300
_MARKS = ("report.css", "list.js")  # that a folder is a report: somebody's own pages may have one of them
_ASSETS = (*_MARKS, "page.js")
_FOLDERS = ("questions", "groups")


class Site:
    """The pages of one report while they are written, see `open_site`."""

    def __init__(self, out: Path, folder: str, assets: Sequence[str]) -> None:
        self.out = out
        self.folder = folder
        (out / "index.html").unlink(missing_ok=True)
        for name in assets:
            (out / name).write_bytes((Path(__file__).parent / "templates" / name).read_bytes())
        for old in [*(page for name in _FOLDERS for page in (out / name).glob("[0-9]*.html")), *out.glob("data/*.js")]:
            old.unlink()
        for name in (folder, "data"):
            (out / name).mkdir(exist_ok=True)

    def page_name(self, place: int) -> str:
        """The file of a page by its place, from 0: ids come from outside and make no file names."""
        return f"{self.folder}/{place:05d}.html"

    def write_page(self, place: int, template: str, *, last: bool, **values: Any) -> None:
        """Write a page of the folder, with links to its neighbours."""
        previous = f"{place - 1:05d}.html" if place else None
        following = None if last else f"{place + 1:05d}.html"
        text = render(template, root="../", previous=previous, next=following, **values)
        (self.out / self.page_name(place)).write_text(text, encoding="utf-8")

    def write_index(self, template: str, **values: Any) -> Path:
        """Write the first page; returns its path."""
        index = self.out / "index.html"
        write_text(index, render(template, root="", **values))
        return index


@contextlib.contextmanager
def open_site(out: Path, *, folder: str, scripts: Sequence[str]) -> Iterator[Site]:
    """The pages of a report, which this process alone writes.

    `index.html` goes first and comes last, so a report that has it is whole. Pages of an earlier report are removed.

    Args:
        out: the report's folder.
        folder: of the pages beside the first, a name of `_FOLDERS`.
        scripts: of `templates/`, that the pages load beside those of all reports.

    Raises:
        RunError: `out` holds something else, or is being written.
    """
    assets = (*_ASSETS, *scripts)
    holds = all((out / name).is_file() for name in _MARKS)
    claim_folder(out, "report", holds=holds, besides=assets)
    with lock(out / ".lock"):
        yield Site(out, folder, assets)


class Listing:
    """The rows of a site's list, written in parts as they come.

    A row holds a value for each heading of the list, then its page, then its marks: words that a filter asks for. Long
    texts are shortened: all rows are in the browser's memory at once.
    """

    def __init__(self, site: Site) -> None:
        self.scripts: list[str] = []
        self._site = site
        self._rows: list[Sequence[Any]] = []

    def add(self, cells: Sequence[Any], page: str, marks: Sequence[str] = ()) -> None:
        """Take one more row."""
        self._rows.append([*map(_short, cells), page, marks])
        if len(self._rows) == _ROWS_PER_FILE:
            self._flush()

    def close(self) -> list[str]:
        """Write what is left; returns the names of all parts."""
        if self._rows:
            self._flush()
        return self.scripts

    def _flush(self) -> None:
        name = f"data/rows-{len(self.scripts):03d}.js"
        values = json.dumps(visible(self._rows), ensure_ascii=False).replace("<", "\\u003c")
        (self._site.out / name).write_text(f"registerRows({values});\n", encoding="utf-8")
        self.scripts.append(name)
        self._rows = []


def _short(value: Any) -> Any:
    """The value with every long text in it shortened."""
    if isinstance(value, str):
        return value if len(value) <= _CELL_COLUMNS else shortened(value, _CELL_COLUMNS)
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def with_last(items: Iterable[T]) -> Iterator[tuple[int, T, bool]]:
    """Each thing with its place and whether it is the last.

    >>> list(with_last("ab"))
    [(0, 'a', False), (1, 'b', True)]
    """
    remaining = iter(items)
    for held in remaining:  # once, as the inner loop takes the rest
        place = 0
        for following in remaining:
            yield place, held, False
            place, held = place + 1, following
        yield place, held, True


def read_json(file: Path) -> dict[str, Any]:
    """What a folder's JSON file holds.

    Raises:
        RunError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read; it is damaged, and what wrote it can write it again") from error
    if not isinstance(found, dict):
        raise RunError(f"{file} holds a {type(found).__name__}, not the figures that this version of reasonrag writes")
    return found


@contextlib.contextmanager
def figures_of(file: Path) -> Iterator[None]:
    """Around everything that reads the figures of a JSON file.

    Raises:
        RunError: they are not as this version writes them.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        told = f"{type(error).__name__}: {one_line(str(error))}"
        raise RunError(
            f"{file} is not as this version of reasonrag writes it ({told}); it is damaged or of another version"
        ) from error


def render(template: str, **values: Any) -> str:
    """A template's text, every value escaped and visible."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("reasonrag.report", "templates"),
        autoescape=True,
        undefined=ChainableUndefined,  # a run of another version may not have counted everything
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "number": number}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment


def _shown(value: Any) -> Any:
    """What a template prints for a value: a dash where there is none, text made visible."""
    from jinja2 import Undefined
    from markupsafe import Markup

    if value is None or isinstance(value, Undefined):
        return "–"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def number(value: Any) -> Any:
    """A number for people: thousands separators from there on, four digits below; anything else as it is.

    >>> number(12345), number(86399.6), number(0.123456), number(None)
    ('12,345', '86,400', '0.1235', None)
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if 1_000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
