"""The tree that docs/look.md explains is the one that its commands make."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.story import PAGES, ROOT, Once, blocks, commands, reasonrag, small

PAGE = "docs/look.md"
TEXT = PAGES[PAGE].read_text(encoding="utf-8")


def test_the_picture_and_the_preferences_are_those_that_the_commands_make(
    tmp_path: Path, places: dict[str, str], once: Once
) -> None:
    case = next(block for block in blocks(PAGE) if "runs/case" in block.text)
    for command in commands(case):
        once(small(command, places), tmp_path)
    drawn = (tmp_path / "tree.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "images" / "case-study.svg").read_text(encoding="utf-8")
    shown = reasonrag(tmp_path, "show", "runs/case", "demo-train-000261")
    preferred = re.findall(r"node (\d+) over node (\d+), 0(\.\d+) over 0(\.\d+)", shown)
    told = re.findall(r"^\| node (\d+),.*?\| node (\d+),.*\| (\.\d+) over (\.\d+) \|", TEXT, re.MULTILINE)
    assert sorted(told) == sorted(preferred) and len(told) == 4
