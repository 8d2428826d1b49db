"""Reading tags from hostile text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonrag.core.text import inert
from reasonrag.formats.base import last_tag

TAGS = ("query", "evidence", "answer")
PIECES = ["<", ">", "/", "|", "query", "answer", "im_end", "\u2028", "\x00"]
hostile = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(), max_size=5)), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("no tag", None),
        ("<answer>open", None),
        ("</answer>closed", None),
        ("<answer></answer>", ("answer", "")),
        ("<answer>a</query>", None),
        ("<Answer>a</Answer>", None),
        ("<answer >a</answer>", None),
        ("<answer>a</answer> <query>b</query>", ("query", "b")),
        ("<answer>a</answer> <query>b", ("answer", "a")),
        ("<answer><answer>a</answer>", ("answer", "a")),
        ("<answer>a</answer></answer>", ("answer", "a")),
        ("<answer>a < b <b>c</b></answer>", ("answer", "a < b <b>c</b>")),
        ("<answer>a\x00b</answer>", ("answer", "a\x00b")),
    ],
)
def test_the_last_well_formed_tag_is_read(text: str, found: tuple[str, str] | None) -> None:
    assert last_tag(text, TAGS) == found


@given(hostile, st.lists(hostile, max_size=3))
def test_reading_a_tag_never_raises(text: str, names: list[str]) -> None:
    for found in (last_tag(text, TAGS), last_tag(text, names)):
        assert found is None or f"<{found[0]}>" in text


@given(hostile, hostile)
def test_a_tag_at_the_end_is_read_whatever_stands_before(before: str, body: str) -> None:
    body = re.sub(r"</?(query|evidence|answer)>", "", body.replace("<", "("))
    assert last_tag(f"{before}<query>{body}</query>", TAGS) == ("query", body.strip())


@given(hostile)
def test_inert_text_holds_no_tag(text: str) -> None:
    assert last_tag(inert(text), TAGS) is None
