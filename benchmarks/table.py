"""How a benchmark shows its figures: a table, or one JSON object with `--json`.

    given = options(__doc__).parse_args()  # add_argument(...) before parse_args() for options
    table = Table(__doc__)
    table.row("server, batches of 64", 0.74, "of the library's rate", limit=">= 0.7")
    table.note("k = 3; queries are ten words in a row of a passage")
    table.show(given.json)

`python -m benchmarks NAME` runs `benchmarks/NAME.py --json` and keeps the object in `docs/results/performance/`, from
which `docs/results/performance.md` is written. Progress belongs on stderr.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import structlog

from tools.pages import head

ROOT = Path(__file__).parents[1]
HEAD = ("what", "figure", "limit", "met")
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


def options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--json`, and send what the library logs to stderr."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


@dataclass(frozen=True, slots=True)
class Row:
    """A figure; `figure` is None if it could not be measured here, and `met` is None without a limit or a figure."""

    what: str
    figure: float | str | None
    unit: str
    limit: str
    met: bool | None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as text, in the order of `HEAD`."""
        figure = "not measured" if self.figure is None else f"{number(self.figure)} {self.unit}".rstrip()
        met = {True: "yes", False: "NO", None: "?" if self.limit else ""}[self.met]
        return self.what, figure, self.limit, met


class Table:
    """The figures of one run of a benchmark, made when the run starts."""

    def __init__(self, about: str | None) -> None:
        """Take the benchmark's docstring, whose first line says what it measures."""
        self._about = (about or "").split("\n", 1)[0]
        self._machine = machine()
        self._started = time.monotonic()
        self._rows: list[Row] = []
        self._notes: list[str] = []

    def row(self, what: str, figure: float | str | None, unit: str = "", *, limit: str = "") -> None:
        """Add a figure. `limit` is a number after `>=`, `<=` or `==`, for example `<= 0.25`."""
        met = None
        if limit:
            compare, bound = limit.split()
            met = None if figure is None else bool(_COMPARE[compare](float(figure), float(bound)))
        self._rows.append(Row(what, figure, unit, limit, met))

    def note(self, text: str) -> None:
        """Add a line below the table: a service law, a size, how a figure was taken."""
        self._notes.append(text)

    def show(self, as_json: bool) -> None:
        """Print the table, or the object."""
        result = {
            "about": self._about,
            "date": date.today().isoformat(),
            "commit": head("reasonrag", "benchmarks"),
            "machine": self._machine,
            "seconds": round(time.monotonic() - self._started, 1),
            "cpu_s": round(_cpu_s(), 1),
            "rows": [asdict(row) for row in self._rows],
            "notes": self._notes,
        }
        print(
            json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) if as_json else "\n".join(lines(result))
        )


def lines(result: dict[str, Any]) -> list[str]:
    """Return what `show` prints of an object that it printed as JSON."""
    cells = [HEAD, *(Row(**row).cells for row in result["rows"])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    table = [_line(row, widths) for row in cells]
    return [result["about"], "", *table, "", *result["notes"], f"{result['machine']}; {took(result)}"]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    what, figure, limit, met = row
    return f"{what:<{widths[0]}}  {figure:>{widths[1]}}  {limit:>{widths[2]}}  {met}".rstrip()


def number(figure: float | str) -> str:
    """Return three significant digits, or all of a larger number.

    >>> number(0.12345), number(1234567.8), number(5), number("a1b2")
    ('0.123', '1,234,568', '5', 'a1b2')
    """
    if isinstance(figure, str):
        return figure
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"


def took(result: dict[str, Any]) -> str:
    """Return how long a benchmark took: by the clock, and in CPU time of its processes."""
    cpu = f", of which {result['cpu_s']:.0f} s on a CPU" if "cpu_s" in result else ""  # not in older figures
    return f"{result['seconds']:.0f} s{cpu}"


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def machine() -> str:
    """Return the machine in words: cores, whether other work runs on them now, memory, GPU."""
    cores = len(os.sched_getaffinity(0))
    # The load average says nothing inside some containers. A busy loop gets all of a core that is free.
    started, used = time.monotonic(), time.process_time()
    while time.monotonic() - started < 0.2:
        pass
    share = (time.process_time() - used) / 0.2
    shared = f" shared with other work (a busy loop got {share:.0%} of one at the start)" if share < 0.9 else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found = "no GPU"
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
        found = ", ".join(name for name in names if name) or found
    return f"{cores} CPU core{'s' * (cores > 1)}{shared}, {memory:.0f} GB of memory, {found}"
