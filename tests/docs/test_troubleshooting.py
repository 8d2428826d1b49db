"""Lines of the troubleshooting page are lines of the product."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.story import PAGES, ROOT

PAGE = "docs/troubleshooting.md"


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
