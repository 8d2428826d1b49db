"""The recipes at full scale: arithmetic is computed again, and settings are those of the files."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from reasonrag.online_rl.settings import rl_presets
from tests.docs.story import PAGES, ROOT, blocks

PAGE = "docs/papers.md"

_TWO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def test_all_arithmetic_on_the_pages_is_right() -> None:
    for page in (PAGE, "docs/engines.md"):
        lines = list(_arithmetic(page))
        assert lines
        for expression, value in lines:
            assert _value(ast.parse(expression, mode="eval").body) == pytest.approx(value, rel=0.01), expression


def test_settings_in_tables_are_those_of_the_configuration_files() -> None:
    seen = 0
    for file, rows in _tables():
        settings = rl_presets().get(file) or yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        for name, shown in rows:
            found: Any = settings
            for part in name.split("."):
                found = found[part]
            assert yaml.safe_load(shown) == found or float(shown) == found, f"{file}: {name}"
            seen += 1
    assert seen > 50


def _arithmetic(page: str) -> Iterator[tuple[str, float]]:
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "text" else ():
            if found := re.match(r"([\d.,e()*/+\- ]+?) = ([\d.,e]+)", line):
                yield found[1].replace(",", "").strip(), float(found[2].replace(",", "").rstrip("."))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return float(_TWO[type(node.op)](_value(node.left), _value(node.right)))
    assert isinstance(node, ast.Constant)
    return float(node.value)


def _tables() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of each table of settings, with the configuration file or preset that is named next."""
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for found in re.finditer(r"^\| setting \| value \| source \|\n(?:\|.*\n)+", text, re.MULTILINE):
        rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", found[0], re.MULTILINE)
        named = re.search(r"--(?:config|preset) ((?!configs/fsdp)[\w./-]+)", text[found.end() :])
        assert named is not None
        yield named[1], rows
