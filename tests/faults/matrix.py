"""The fault matrix: tests that are marked as a row of it, the figures that they saw, and the page with both.

    @pytest.mark.fault("1", "SIGKILL at a random moment of build-tree", "the rows of a run that nothing interrupted")
    def test_killed(rounds: Rounds, figure: Figure) -> None:
        tries = rounds(3, 80)
        ...
        figure(f"{same} of {tries} identical")

The suite runs every row at a small size. `make faults` is `pytest -m fault --faults`: each row at its full size, kept
line by line in `docs/results/faults.json`, from which `docs/results/faults.md` is written. Tests of some files renew
their own lines alone.
"""

from __future__ import annotations

import ast
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

import pytest

from reasonrag.storage.files import read_json, write_json, write_text
from tools.pages import head, made

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "faults.json"

Rounds = Callable[[int, int], int]
"""Returns how often a row tries: the first number in the suite, the second one under `make faults`."""
Figure = Callable[[str], None]
"""Keeps what a row has seen, for the page; called before what may fail."""

_MARKER = (
    "fault(row, fault, expected, before=''): a line of the fault matrix: its row, what is done, what has to hold, and "
    "what happened before that was mended"
)
_FULL = "full: a case of the fault matrix that only `make faults` runs, as another one like it is in the suite"
_SECTIONS = {  # of the page, and the rows in each; attacks have their own
    "Kills and stops": ("1", "2", "3", "4", "drain"),
    "Disks, files and locks": ("5", "6", "7", "8", "9", "10", "flips", "power cut"),
    "Engines and retrievers that fail, hang or lie": (*map(str, range(11, 20)), "20b"),
    "Texts, tokens and numbers": ("20a", *map(str, range(21, 28)), "fuzz"),
    "Data sets, settings, the Hub, secrets and names": tuple(map(str, range(28, 37))),
    "Code of others, servers, pages, machines": tuple(map(str, range(37, 41))),
    "Others": (),  # rows that are in none
}
_INTRODUCTION = """\
<!-- Written by `make faults` and `python -m docs.reference` from docs/results/faults.json; do not edit. -->
# Faults

What is done to reasonrag, what has to hold, and what was seen when `make faults` did it. Every call whose answer came
back is kept, a resumed run gives the rows of one that nothing interrupted, only calls in flight are paid twice, nothing
waits for ever, and nothing untrusted steers the program. Each line is a test, which `faults.json` names; the suite runs
it with fewer tries. A call is in flight until its answer is here; damage is harmless if what is read stays equal.

Row 20b, a GPU that has no memory left, needs one: `make gpu` runs it and keeps its lines, and `make faults` leaves them
as they are. On a CPU torch's error is raised by hand (`tests/llm/test_local_worker.py`). Row 21 trains on a CPU."""
_ATTACKS = "What two rounds of attacks found, what happened before it was mended, and what was seen after that."


@dataclass(slots=True)
class Line:
    """A line of the matrix: one marker of one test, and what its cases saw the last time."""

    row: str
    fault: str
    expected: str
    before: str
    test: str
    outcomes: dict[str, int] = field(default_factory=dict)  # cases by how they ended
    figures: list[str] = field(default_factory=list)
    date: str = ""

    @property
    def passed(self) -> bool:
        return set(self.outcomes) == {"passed"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="rows of the fault matrix at full size; writes its page")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.addinivalue_line("markers", _FULL)
    if config.getoption("--faults") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "fault-matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--faults"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def rounds(pytestconfig: pytest.Config) -> Rounds:
    many = pytestconfig.getoption("--faults")
    return lambda in_suite, in_full: in_full if many else in_suite


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    return lambda text: record_property("figure", text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("fault"):
        assert "figure" in getattr(item, "fixturenames", ()), "a row of the fault matrix prints what it has seen"
        row, fault, expected = mark.args
        item.user_properties.append(("fault", [row, fault, expected, mark.kwargs.get("before", "")]))
        if item.get_closest_marker("gpu"):
            import torch

            item.user_properties.append(("figure", f"on one {torch.cuda.get_device_name()}"))


class _Recorder:
    """Collects the lines of the tests that ran, and writes them when the last one has ended."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, str, str], Line] = {}
        self.machine = ""  # that the page names, which is that of the rows without a GPU

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (report.when == "call" or report.failed or (report.when == "setup" and report.skipped)):
            return
        test = re.sub(r"\[.*", "", report.nodeid)
        self.machine = self.machine if "gpu" in report.keywords else _machine()
        properties: list[tuple[str, Any]] = report.user_properties
        for row, fault, expected, before in (value for name, value in properties if name == "fault"):
            line = self.lines.setdefault((row, fault, test), Line(row, fault, expected, before, test))
            line.outcomes[report.outcome] = line.outcomes.get(report.outcome, 0) + 1
            seen = [text for name, text in properties if name == "figure"]
            seen += [str(report.longrepr[2])] if report.skipped and isinstance(report.longrepr, tuple) else []
            line.figures += [text for text in seen if text not in line.figures]
            line.date = date.today().isoformat()

    def pytest_sessionfinish(self) -> None:
        if not self.lines:
            return
        old = {(line.row, line.fault, line.test): line for line in read_lines() if _exists(line.test)}
        renewed = {line.test for line in self.lines.values()}
        kept = {key: line for key, line in old.items() if line.test not in renewed}
        lines = sorted((kept | self.lines).values(), key=lambda line: (_order(line.row), line.test, line.fault))
        machine = self.machine or (read_json(RESULTS) or {}).get("machine", "")
        made_by = {"machine": machine, "commit": head("reasonrag", "tests/faults")}
        write_json(RESULTS, {**made_by, "lines": [asdict(line) for line in lines]}, indent=1)
        write_text(RESULTS.with_suffix(".md"), faults_page())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("fault matrix")
        for line in sorted(self.lines.values(), key=lambda line: _order(line.row)):
            terminalreporter.write_line(f"{line.row:>6} {_verdict(line):7} {line.fault}: {'; '.join(line.figures)}")


def read_lines() -> list[Line]:
    """Return the lines that were kept."""
    return [Line(**line) for line in (read_json(RESULTS) or {}).get("lines", [])]


def faults_page() -> str:
    """Return the page: the matrix, then what was found before it was mended."""
    lines = read_lines()
    rows: dict[str, bool] = {}
    for line in lines:
        rows[line.row] = rows.get(line.row, True) and line.passed
    kept = read_json(RESULTS) or {}
    by = made(kept.get("commit", ""), "faults.md")
    text = [
        _INTRODUCTION,
        "",
        f"**{sum(rows.values())} of {len(rows)} rows hold**, {sum(line.passed for line in lines)} of {len(lines)} "
        f"lines; on {kept.get('machine', '')}. Renewed last by {by}.",
    ]
    first: dict[str, Line] = {}  # of each test, as two lines of one have seen the same
    attacks = [line for line in lines if line.before]
    section_of = {row: title for title, members in _SECTIONS.items() for row in members}
    for title in _SECTIONS:
        members = [line for line in lines if section_of.get(line.row, "Others") == title and not line.before]
        if members:
            text += ["", f"## {title}", "", *_table(members, first, ["row", "fault", "what has to hold", "seen"])]
    text += ["", "## Before and after", "", _ATTACKS, ""]
    text += _table(attacks, first, ["row", "fault", "what has to hold", "before", "seen"])
    return "\n".join(text) + "\n"


def _table(lines: Iterable[Line], first: dict[str, Line], head: list[str]) -> Iterable[str]:
    from docs.reference.markdown import cell  # which imports every page
    from reasonrag.core.table import Table

    rows = []
    for line in lines:
        before = [line.before] if "before" in head else []
        shown = first.setdefault(line.test, line)
        figures = "<br>".join(escape(text, quote=False) for text in line.figures)
        seen = figures if shown is line else f"see {shown.row}, {shown.fault}"
        seen = ("" if line.passed else f"**{_verdict(line)}** ") + seen
        rows.append([cell(text) for text in (line.row, line.fault, line.expected, *before, seen)])
    return Table("", head, rows).markdown(str)


def _verdict(line: Line) -> str:
    return "holds" if line.passed else "not run" if set(line.outcomes) == {"skipped"} else "FAILED"


def _order(row: str) -> tuple[int, int, str]:
    """Numbers first, then attacks, then names."""
    found = re.fullmatch(r"(A?)(\d+)(.*)", row)
    return (bool(found[1]), int(found[2]), found[3]) if found else (2, 0, row)


def _exists(test: str) -> bool:
    """Return whether a test that was kept is still there."""
    file, *_, name = test.split("::")
    path = ROOT / file
    if not path.exists():
        return False
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in nodes)


def _machine() -> str:
    return f"{os.cpu_count()} CPU cores, {platform.system()}, Python {platform.python_version()}"
