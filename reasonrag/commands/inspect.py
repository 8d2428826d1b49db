"""`show`, `stats`, `graph`, `export` and `import`: a finished run looked at and handed on."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from reasonrag.commands.shell import table_console
from reasonrag.core.text import printable
from reasonrag.publish.exchange import EXPORTERS, IMPORTERS
from reasonrag.report import terminal
from reasonrag.report.graph import write_graphml, write_node_link
from reasonrag.report.stats import stats as figures_of

Form = Literal["graphml", "node-link"]


def report(folder: Path, out: Path | None, *, in_browser: bool) -> None:
    """Write the pages of what a folder holds, and show them if asked to."""
    from reasonrag.report import write_report

    page = write_report(folder, out)
    print(printable(f"report: {page}"))
    if in_browser:
        webbrowser.open(page.resolve().as_uri())


def show(run: Path, question_id: str, dataset: str | None = None) -> None:
    """Print the tree of one question."""
    terminal.show(run, question_id, table_console(), dataset)


def stats(run: Path, *, as_json: bool) -> None:
    """Print a run's figures, as tables or as JSON."""
    figures = figures_of(run)
    if as_json:
        print(json.dumps(figures, indent=2, allow_nan=False))
    else:
        table_console().print(terminal.tables(figures))


def graph(run: Path, out: Path, form: Form, question_ids: Collection[str] = ()) -> None:
    """Write trees for other tools: GraphML files into the folder `out`, or node-link JSON lines into the file `out`."""
    write = write_graphml if form == "graphml" else write_node_link
    print(f"graphs: {write(run, out, question_ids)} in {out}")


def export(run: Path, form: str, out: Path) -> None:
    """Write a run's data as another tool reads it."""
    _say(EXPORTERS[form](run, out), out)


def import_(source: Path, form: str, test: Path | None, out: Path) -> None:
    """Write somebody's preferences as pairs."""
    _say(IMPORTERS[form](source, out, test=test), out)


def _say(counts: Mapping[str, int], out: Path) -> None:
    rows = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print(printable(f"rows: {rows}\ndata: {out}"))
