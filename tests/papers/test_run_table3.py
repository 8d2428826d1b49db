"""The paper's comparison at a tiny scale, by its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import product

pytestmark = pytest.mark.slow


def test_reproduce_says_each_command_and_writes_a_page_next_to_the_papers_table(tmp_path: Path) -> None:
    scale = ("--seeds", "1", "--limit", "14", "--iterations", "6", "--test-limit", "4", "--max-steps", "3")
    scale += ("--only", "dpo-rollout")  # each training is a process that imports torch
    done = product.run("papers", "reasonrag", *scale, "--out", tmp_path / "out", timeout_s=600)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "results" / "reasonrag.md").read_text(encoding="utf-8")
    assert "| `dpo-rollout` - `base` | EM | Table 3" in page and "+12.5 (5 of 5)" in page
    assert "4 held-out questions" in page
    assert (tmp_path / "out" / "results" / "reasonrag.svg").stat().st_size > 1000
    assert "`dpo-alpha1` with seed 0" in page and "trees-judge" not in page
    commands = re.findall(r"^\[\d+/\d+\].*", done.stderr, re.MULTILINE)
    again = product.run("papers", "reasonrag", *scale, "--out", tmp_path / "out")
    assert again.returncode == 0
    assert re.findall(r"^\[\d+/\d+\].*", again.stderr.replace("done before:", "$"), re.MULTILINE) == commands
