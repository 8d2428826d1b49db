"""The parts that all reports share: files of a site, inert rendering, charts, lists in parts, texts stored once a page.

OUT/
├── index.html              settings, metrics, the list of questions or of trajectories
├── questions/00000.html    one question, in the folder's order
├── data/rows-000.js        rows of the list: a page opened from disk may not fetch JSON, but may load a script
└── report.css, *.js

Every value that a template prints goes through `visible` and is escaped. The pages'
Content-Security-Policy allows the report's own files and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import tee, zip_longest
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reasonrag.core.errors import RunError
from reasonrag.core.plots import BarChart, Panel, images
from reasonrag.core.text import excerpt, map_texts, one_line, printable
from reasonrag.storage.files import write_text, writing
from reasonrag.storage.folder import Folder
from reasonrag.storage.parquet import Row

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_ASSETS = ("*.css", "*.js", "*.LICENSE")
_TITLE_CHARS = 80  # of a question in a page's title
_CELL_CHARS = 300
_ROWS_PER_FILE = 500


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
    """A page about one question: a row that describes it, the data that its script draws, and its rows of the list."""

    question: Row
    details: dict[str, Any]
    rows: Sequence[ListRow]


class Site:
    """The pages of one report while they are written, see `open_site`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._rows: list[Any] = []  # of the list on the first page, as `list.js` reads them

    def write_pages(self, template: str, pages: Iterable[Page]) -> None:
        """Write the pages of the questions, with links to their neighbours, and keep their rows of the list.

        Pages are named by their numbers: ids come from outside and never become file names.
        """
        # One page ahead, because each page links to the next one.
        current, ahead = tee(pages)
        next(ahead, None)
        for number, (page, following) in enumerate(zip_longest(current, ahead)):
            name = f"questions/{number:05d}.html"
            text = render(
                template,
                root="../",
                previous=f"{number - 1:05d}.html" if number else None,
                next=f"{number + 1:05d}.html" if following else None,
                question=page.question,
                short_title=shortened(page.question["question"], _TITLE_CHARS),
                details=page.details,
            )
            (self.out / name).write_text(text, encoding="utf-8")
            for row in page.rows:
                cells = map_texts(row.cells, _shortened_cell)  # all rows are in the browser at once
                self._rows.append([len(self._rows), *cells, name + row.anchor, row.marks])

    def write_index(self, template: str, **values: Any) -> Path:
        """Write the rows of the list and then the first page; return its path."""
        scripts: list[str] = []
        for start in range(0, len(self._rows), _ROWS_PER_FILE):
            scripts.append(f"data/rows-{len(scripts):03d}.js")
            # `<` could end the script where a page holds it; JSON may escape any character.
            rows = json.dumps(visible(self._rows[start : start + _ROWS_PER_FILE]), ensure_ascii=False)
            rows = rows.replace("<", "\\u003c")
            (self.out / scripts[-1]).write_text(f"registerRows({rows});\n", encoding="utf-8")
        write_text(self.out / "index.html", render(template, root="", scripts=scripts, **values))
        return self.out / "index.html"


@contextlib.contextmanager
def open_site(out: Path) -> Iterator[Site]:
    """Lock a report's folder and empty it for new pages.

    `index.html` is deleted first and written last, so a report that has it is complete.

    Raises:
        RunError: `out` holds other files, or another process writes there.
    """
    assets = [path for pattern in _ASSETS for path in _TEMPLATES.glob(pattern)]
    # Two markers, as a site by hand may have one of them.
    with Folder(out, "report", "report.css", "list.js", ignore=[path.name for path in assets]).locked():
        for pattern in ("*.html", "questions/[0-9]*.html", "data/*.js"):
            for old in out.glob(pattern):
                old.unlink()
        for path in assets:
            with writing(out / path.name) as file:  # a new file: another name of it, a hard link, keeps its content
                file.write(path.read_bytes())
        for name in ("questions", "data"):
            (out / name).mkdir(exist_ok=True)
        yield Site(out)


def _shortened_cell(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else shortened(text, _CELL_CHARS)


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
        # By content: ids of passages may repeat in another corpus.
        index = self._indices.setdefault(json.dumps(item, sort_keys=True), len(self.items))
        if index == len(self.items):
            self.items.append(item)
        return index

    def messages(self, prompt: Iterable[Row]) -> list[int]:
        """Return the indices of a prompt's messages."""
        return [self.index({"role": message["role"], "content": message["content"]}) for message in prompt]

    def passages(self, passages: Iterable[Row]) -> list[list[Any]]:
        """Return the index and the score of each passage."""
        indexed: list[list[Any]] = []
        for passage in passages:
            item = {"id": passage["id"], "contents": passage["contents"]}
            indexed.append([self.index(item), number(passage["score"])])
        return indexed


class Chart(NamedTuple):
    """A picture and its numbers in words."""

    source: str  # a `data:` URL
    description: str


def chart(drawn: Panel | BarChart) -> Chart:
    """Draw a panel or bars with matplotlib, as an SVG image within the page."""
    courses = []
    if isinstance(drawn, BarChart):
        courses = [f"{bar.group}, {bar.label}: {bar.mean:.3f} [{bar.low:.3f}, {bar.high:.3f}]" for bar in drawn.bars]
    for line in drawn.lines if isinstance(drawn, Panel) else ():
        if points := [(x, y) for x, y in zip(line.x, line.y, strict=True) if isfinite(x) and isfinite(y)]:
            (start, first), (end, last) = points[0], points[-1]
            courses.append(f"{line.label}: {first:.4g} at {start:g}, {last:.4g} at {end:g}")
    # An image in a `data:` URL can neither run scripts nor load anything.
    svg = base64.b64encode(images([drawn], ["svg"])["svg"]).decode()
    return Chart(f"data:image/svg+xml;base64,{svg}", f"{drawn.title}. {'; '.join(courses) or 'no data'}.")


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
    environment = template_environment("reasonrag.report", _shown, missing="–", escape=True)
    environment.filters |= {"visible": visible, "number": number}
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template(template).render(**values)


@cache
def template_environment(package: str, show: Callable[[Any], Any], *, missing: str, escape: bool) -> Environment:
    """Return the templates of a package; values print as `show` returns them, unless they are `missing` or Markup."""
    from jinja2 import ChainableUndefined, Environment, PackageLoader, Undefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        if value is None or isinstance(value, Undefined):
            return missing
        return value if isinstance(value, Markup) else show(value)

    return Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=escape,
        undefined=ChainableUndefined,  # a run of another version may lack some counts
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


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
    return map_texts(value, printable)


def shortened(text: str, length: int) -> str:
    """Cut a text to one line of at most `length` characters.

    >>> shortened("Who was\\nthe captain?", 12)
    'Who was the…'
    """
    line = one_line(visible(text[: 4 * length]))  # more than `length`, because runs of blanks shrink to one
    if len(text) <= 4 * length and len(line) <= length:
        return line
    return line[: length - 1].rstrip() + "…"
