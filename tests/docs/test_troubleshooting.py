"""Lines of the troubleshooting page are lines of the product."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.story import PAGES, ROOT, run_here
from tests.e2e import product

PAGE = "docs/troubleshooting.md"

# A line of the page (`...` is anything), and commands of which the last one says it.
PROVOKED = (
    (
        "... holds a different ... (search.iterations: 2 there, 3 now); go back to that, or choose a new folder for "
        "--out",
        (
            "build-tree --preset demo --limit 1 --iterations 2 --policy extractive --out run",
            "build-tree --preset demo --limit 1 --iterations 3 --policy extractive --out run",
        ),
    ),
    (
        "... holds other files and no ...; choose a new folder for --out",
        (
            "export demo --to flashrag --out world",
            "build-tree --preset demo --limit 1 --policy extractive --out world",
        ),
    ),
    (
        "no server answers at ... is it running, and is this its address?",
        ("build-tree --preset demo --limit 1 --policy http://127.0.0.1:9/v1 --policy-model m --out run",),
    ),
    ("unknown key ...; did you mean ...?", ("build-tree --preset demo --set search.iteration=2 --out run",)),
    ("... cannot judge; choose a model with --judge", ("build-tree --preset demo --limit 1 --value judge --out run",)),
    ("a dense index needs a model: add --encoder, ...", ("index build --corpus c.jsonl --kind dense --out i",)),
)


def lines() -> list[str]:
    """What stands in the first column of the page's tables."""
    text = PAGES[PAGE].read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [line for cell in cells for line in re.findall(r"`([^`]+)`", cell)]


@cache
def _said() -> str:
    """Every text of the program, with a blank for what is put in, and without white space."""
    texts = []
    for file in (ROOT / "reasonrag").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("line", lines())
def test_a_line_is_one_of_the_product(line: str) -> None:
    parts = [part for part in re.split(r"\.\.\.|\(.*? there, .*? now\)|\d+", line) if len(part.strip()) > 3]
    assert parts
    assert [part for part in parts if part.strip() not in _said()] == []


@pytest.mark.parametrize(("line", "commands"), PROVOKED)
def test_a_line_comes_as_the_page_has_it(line: str, commands: tuple[str, ...], tmp_path: Path) -> None:
    assert line in lines()
    for command in commands:
        code, _, stderr = run_here(tmp_path, command.split(), product.environment())
    assert code == 2
    pattern = "error: (configuration: )?" + ".*".join(map(re.escape, line.split("..."))) + ".*"
    assert re.fullmatch(pattern, stderr.strip().splitlines()[-1]), stderr
