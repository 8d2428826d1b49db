"""`reasonrag report`: a run's folder to pages that open from disk.

OUT/
├── index.html              what was run, what came out, the list of questions
├── questions/00000.html    one question's tree, in the run's order
├── data/questions-000.js   rows of the list: a page opened from disk may not fetch JSON, but may load a script
└── report.css, *.js

Everything that a template prints goes through `visible` and is escaped; the pages' policy (CSP) allows the report's own
files and nothing else.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.report.drawing import details, draw
from reasonrag.report.overview import Overview
from reasonrag.report.reading import TreeWithPairs, read_trees
from reasonrag.report.visible import shortened, visible
from reasonrag.runs import claim_folder, read_run
from reasonrag.settings import dump
from reasonrag.tables import Row

if TYPE_CHECKING:
    from jinja2 import Environment

_ROWS_PER_FILE = 500
_ASSETS = ("report.css", "index.js", "tree.js")
_TITLE_COLUMNS = 80


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the pages of a finished run; returns the path of the first one.

    Args:
        run: its folder.
        out: where the pages go, RUN/report by default. Pages of an earlier report there are replaced.

    Raises:
        RunError: there is no finished run, or `out` holds something else.
        DataError: its tables are damaged.
    """
    config, summary = read_run(run)
    out = out or run / "report"
    _prepare(out)
    overview = Overview()
    rows = [
        [place, *row.values()] for place, row in enumerate(_question_pages(run, summary, out / "questions", overview))
    ]
    scripts = list(_row_scripts(rows, out / "data"))
    page = _render(
        "index.html.j2",
        root="",
        config=config,
        settings=dump(config),
        summary=summary,
        overview=overview,
        scripts=scripts,
    )
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def _prepare(out: Path) -> None:
    """Make the folder and its assets, without pages of an earlier report.

    `index.html` goes first and comes last: a report that has it is whole.
    """
    claim_folder(out, "report", holds=(out / _ASSETS[0]).is_file())
    for name in _ASSETS:
        (out / name).write_bytes((Path(__file__).parent / "templates" / name).read_bytes())
    (out / "index.html").unlink(missing_ok=True)
    for folder, old in (("questions", "[0-9]*.html"), ("data", "questions-*.js")):
        (out / folder).mkdir(exist_ok=True)
        for page in (out / folder).glob(old):
            page.unlink()


def _question_pages(run: Path, summary: Row, folder: Path, overview: Overview) -> Iterator[Row]:
    """Write one page a question; yields the questions' rows of the list."""
    trees = read_trees(run, summary)
    following = next(trees, None)
    for place in itertools.count():
        tree, following = following, next(trees, None)
        if tree is None:
            return
        page = _question_page(tree, place, last=following is None)
        (folder / page_name(place)).write_text(page, encoding="utf-8")
        yield overview.add(tree)


def _question_page(tree: TreeWithPairs, place: int, *, last: bool) -> str:
    return _render(
        "question.html.j2",
        root="../",
        question=tree.root,
        short_title=shortened(tree.root["question"], _TITLE_COLUMNS),
        drawing=draw(tree),
        details=details(tree),
        previous=page_name(place - 1) if place else None,
        next=None if last else page_name(place + 1),
    )


def page_name(place: int) -> str:
    """The file of the question at a place, from 0: ids come from outside and make no file names."""
    return f"{place:05d}.html"


def _row_scripts(rows: list[list[Any]], folder: Path) -> Iterator[str]:
    """Write the list of questions in parts; yields their names."""
    for part, start in enumerate(range(0, len(rows), _ROWS_PER_FILE)):
        name = f"questions-{part:03d}.js"
        values = json.dumps(visible(rows[start : start + _ROWS_PER_FILE]), ensure_ascii=False).replace("<", "\\u003c")
        (folder / name).write_text(f"registerQuestions({values});\n", encoding="utf-8")
        yield f"data/{name}"


def _render(template: str, **values: Any) -> str:
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
    """A number for people: whole ones with thousands separators, others with four digits; anything else as it is.

    >>> number(12345), number(0.123456), number(None)
    ('12,345', '0.1235', None)
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
