"""Every page of results names the commit that made it, and what changed its numbers since. No git is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pages import RESULTS, problem, renewed

PAGES = sorted(RESULTS.rglob("*.md"))
NAME, WORDS = "rounds.md", "`12f67bb0` begins with another policy"
CHANGES = (("2026-11-28 05:52", ("rounds.md", "*hiprag.md"), WORDS),)
BEFORE, AFTER = (
    f"# A page\n\nMade by commit `0a78ebd2` of {date}.\n" for date in ("2026-01-01 00:00", "2999-01-01 00:00")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(RESULTS).as_posix())
def test_a_page_names_its_commit_and_what_changed_its_numbers_since(page: Path) -> None:
    assert problem(page.read_text(encoding="utf-8"), page.relative_to(RESULTS).as_posix()) == ""


def test_a_page_older_than_a_change_needs_the_sentence_that_write_gives_it() -> None:
    assert problem("# A page\n", NAME, CHANGES) == "names no commit"
    assert "--write" in problem(BEFORE, NAME, CHANGES)
    written = renewed(BEFORE, NAME, CHANGES)
    assert WORDS in written and written.endswith(": numbers differ under today's code.\n")
    assert problem(written, NAME, CHANGES) == "" and renewed(written, NAME, CHANGES) == written
    assert problem(AFTER, NAME, CHANGES) == problem(BEFORE, "another.md", CHANGES) == ""


def test_a_page_made_again_loses_the_sentence() -> None:
    again = renewed(BEFORE, NAME, CHANGES).replace("2026-01-01 00:00", "2999-01-01 00:00")
    assert renewed(again, NAME, CHANGES) == AFTER
