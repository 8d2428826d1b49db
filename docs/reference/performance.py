"""`results/performance.md`: what the benchmarks measured, from the objects that `python -m benchmarks` keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.table import HEAD, Row, took
from docs.reference.markdown import cell
from reasonrag.core.table import Table
from reasonrag.storage.files import require_json
from tools.pages import made

FIGURES = Path(__file__).parents[1] / "results" / "performance"
# What `make bench` runs, in this order: at most 6 minutes together.
QUICK = ("utilisation", "official", "own_cost", "memory", "export", "retrieval", "training")
_INTRODUCTION = """\
<!-- Written by `python -m benchmarks` and `python -m docs.reference` from docs/results/performance/; do not edit. -->
# Performance

What `make bench` measured, and below it the benchmarks that take longer or need more than a CPU. Each is one command;
its docstring, in `benchmarks/`, says how it measures. A limit is what the figure is held against; a figure that misses
its limit stays here. Figures are medians and ratios of one run, because absolute times of a shared machine mean
little."""


def performance_page() -> str:
    """Return the page: a table of figures for each benchmark that has ever run."""
    found = {path.stem: require_json(path, "run the benchmark again") for path in FIGURES.glob("*.json")}
    names = [name for name in QUICK if name in found] + sorted(found.keys() - set(QUICK))
    lines = [_INTRODUCTION]
    for name in names:
        lines += ["", f"## {name}", "", *_section(name, found[name])]
    return "\n".join(lines) + "\n"


def _section(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield from [result["about"], ""]
    rows = [[cell(text) for text in Row(**row).cells] for row in result["rows"]]
    yield from Table("", HEAD, rows).markdown(str)
    yield ""
    yield from (f"- {note}" for note in result["notes"])
    command = " ".join(["python -m benchmarks", name, *([result["options"]] if "options" in result else [])])
    by = made(result["commit"], "performance.md")
    yield f"- `{command}`, {result['date']}, {by}: {took(result)}, on {result['machine']}."
