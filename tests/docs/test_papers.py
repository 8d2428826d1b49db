"""Every function, setting and test that docs/papers.md names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.reference.settings import fields
from reasonrag.core.config import Config
from reasonrag.online_rl.settings import RLSettings
from tests.docs.story import PAGES, ROOT

PACKAGE = ROOT / "reasonrag"
TEXT = PAGES["docs/papers.md"].read_text(encoding="utf-8")
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


def test_every_function_and_setting_of_the_tables_exists() -> None:
    named = [name for code, _ in rows() for name in re.findall(r"`([^`]+)`", code)]
    assert len(named) > 40
    assert [name for name in named if not (is_there(name) or name in SETTINGS or (PACKAGE / name).is_dir())] == []


def test_every_dotted_name_in_the_text_is_a_function_or_a_setting() -> None:
    dotted = set(re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:\[\w+\])?`", TEXT))
    assert [name for name in sorted(dotted) if not (is_there(name) or name in SETTINGS)] == []


def test_every_test_of_the_tables_exists() -> None:
    for _, tests in rows():
        places = re.findall(r"`([^`]+)`", tests)
        assert places
        for place in places:
            path, _, function = place.partition("::")
            assert (ROOT / path).exists(), place
            assert not function or function in defined(ROOT / path), place
