"""Every function, setting, test and command that docs/papers.md names is there, and every table and figure in it."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.reference.settings import fields
from papers import PAPERS
from papers.__main__ import main as papers
from reasonrag.core.config import Config
from reasonrag.online_rl.settings import RLSettings
from tests.docs.story import PAGES, ROOT, read

# Tables and figures of each paper, appendices included.
COUNTS = {"ReasonRAG": (5, 14), "HiPRAG": (6, 8), "Search-P1": (13, 10), "Learning when to search": (9, 7)}

PACKAGE = ROOT / "reasonrag"
TEXT = PAGES["docs/papers.md"].read_text(encoding="utf-8").partition("\n## Recipes at full scale\n")[0]
SETTINGS = {name for model in (Config, RLSettings) for name, _ in fields(model)}


def rows() -> Iterator[tuple[str, str]]:
    """The code and the tests that a line of a table names."""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "paper":
            yield cells[1], cells[2]


@cache
def defined(file: Path) -> set[str]:
    """Names that a module defines, `Class.method` too."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if hasattr(inner, "name")}
        for target in [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", []):
            found |= {target.id} if isinstance(target, ast.Name) else set()
    return found


def is_there(name: str) -> bool:
    """Whether `package.module`, `package.module.function` or `package.module.Class.method` is ours."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        place = PACKAGE.joinpath(*parts[:split])
        file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
        if file is not None:
            return split == len(parts) or ".".join(parts[split:]) in defined(file)
    return False


def test_every_function_and_setting_that_the_page_names_exists() -> None:
    named = {name for code, _ in rows() for name in re.findall(r"`([^`]+)`", code)}
    named |= set(re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:\[\w+\])?`", TEXT))
    assert len(named) > 40
    assert [name for name in named if not (is_there(name) or name in SETTINGS or (PACKAGE / name).is_dir())] == []


def test_every_test_of_the_tables_exists() -> None:
    for _, tests in rows():
        places = re.findall(r"`([^`]+)`", tests)
        assert places
        for place in places:
            path, _, function = place.partition("::")
            assert (ROOT / path).exists(), place
            assert not function or function in defined(ROOT / path), place


def shown() -> Iterator[tuple[str, str, str, str]]:
    """Paper, table or figure (`Table 4`), verdict, and where it is here, of every one that the page lists."""
    paper = ""
    for line in TEXT[TEXT.index("## Every table and figure") :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        paper = line.removesuffix(":") if line.removesuffix(":") in COUNTS else paper
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "number":
            kind = ""
            for part in cells[0].split(", "):
                kind, _, numbers = part.rpartition(" ") if " " in part else (kind, "", part)
                first, _, last = numbers.partition("-")
                for number in range(int(first), int(last or first) + 1):
                    yield paper, f"{kind} {number}", cells[2], cells[3]


def test_every_table_and_figure_has_one_verdict_and_they_are_counted() -> None:
    found = list(shown())
    expected = [(paper, f"Table {n}") for paper, (tables, _) in COUNTS.items() for n in range(1, tables + 1)]
    expected += [(paper, f"Fig. {n}") for paper, (_, figures) in COUNTS.items() for n in range(1, figures + 1)]
    assert sorted((paper, number) for paper, number, *_ in found) == sorted(expected)
    verdicts = Counter((verdict, number[:5] == "Table") for _, number, verdict, _ in found)
    counted = re.findall(r"^- \*\*(\w+)\*\* \((\d+) tables, (\d+) figures\)", TEXT, re.MULTILINE)
    names = sorted({verdict for _, _, verdict, _ in found})
    assert sorted(counted) == [(name, str(verdicts[name, True]), str(verdicts[name, False])) for name in names]


def test_what_is_made_here_names_its_command_and_every_command_can_be_read() -> None:
    for paper, number, verdict, here in shown():
        commands = re.findall(r"`(?:reasonrag|python -m) ([^`]+)`", here)
        assert (verdict in ("made", "part")) == bool(commands), f"{paper}, {number}"
        for command in commands:
            words = shlex.split(command)
            out = ("--out", "OUT") if words[0] in ("eval", "papers", "build-tree", "rl") else ()
            if words[0] == "papers":
                assert papers.make_context("papers", [*words[1:], *out]).params["paper"] in PAPERS
            else:
                read((*words, *out))
