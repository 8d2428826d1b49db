"""A paper's ablations at a tiny scale, by their command: trained, judged, and a page of what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import product

pytestmark = pytest.mark.slow

TINY = ("--seeds", "1", "--limit", "10", "--test-limit", "6", "--max-steps", "2", "--only", "lp-0.4")


def test_hiprag_is_trained_judged_and_set_beside_the_paper_and_is_not_done_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("papers", "hiprag", *TINY, "--out", out)
    done = product.run(*command, timeout_s=600)
    assert done.returncode == 0, done.stderr
    page = (out / "results" / "hiprag.md").read_text(encoding="utf-8")
    assert "6 held-out questions" in page and "`lp-0` with seed 0" in page
    assert "| `lp-0.4` - `lp-0` | OSR | Table 2" in page and "-4.3 (7 of 7)" in page
    figures = json.loads((out / "results" / "hiprag.json").read_text(encoding="utf-8"))
    for found in figures["settings"].values():
        assert set(found["variants"]) == {"base", "lp-0.4"} and set(found["differences"]) == {"lp-0.4 - base"}
        assert found["variants"]["base"]["all"]["osr"] is not None
    assert figures["curves"]["reward/bonus"]["lp-0.4"]
    assert (out / "results" / "hiprag.svg").stat().st_size > 1000
    again = product.run(*command)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before:") == 3 and "$ reasonrag" not in again.stderr
