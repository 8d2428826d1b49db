"""Metrics against recorded scores, quoted text against hostile text."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonrag.core.text import cover_match, exact_match, inert, one_line, token_f1, valid_unicode

SCORES = Path(__file__).parents[2].parent / "shared/data/scores"
needs_data = pytest.mark.skipif(not SCORES.is_dir(), reason="shared/data/scores is not beside the repository")

METRICS = {"em": exact_match, "f1": token_f1, "acc": cover_match}

# All of Unicode, lone surrogates too, and pieces that tags and special tokens are made of.
PIECES = ["<", ">", "/", "|", "\uff5c", "\u2581", "[", "]", "INST", "query", "answer", "im_end", "s", "\u2028", "\x00"]
TAGS = ("query", "evidence", "answer")
hostile = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(), max_size=5)), max_size=30).map("".join)


def recorded(pattern: str) -> Iterator[tuple[str, list[str], dict[str, float]]]:
    """Prediction, golden answers and recorded scores of each row of the score files."""
    for path in sorted(SCORES.glob(pattern)):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            rows: list[dict[str, Any]] = (
                json.load(file) if path.suffixes[0] == ".json" else [json.loads(line) for line in file]
            )
        for row in rows:
            scores = row["output"]["metric_score"] if "output" in row else row
            prediction = row["output"]["pred"] if "output" in row else row["prediction"]
            yield prediction, row["golden_answers"], {name: float(scores[name]) for name in METRICS if name in scores}


@pytest.mark.data
@needs_data
@pytest.mark.parametrize(
    ("pattern", "rows", "scores"),
    [("search_r1_*.jsonl.gz", 2132, 6396), ("fireact_*.jsonl.gz", 642, 1284), ("flashrag_*.json.gz", 82, 246)],
)
def test_flashrag_rules_give_every_recorded_score(pattern: str, rows: int, scores: int) -> None:
    compared = [
        (name, prediction, gold, METRICS[name](prediction, gold, rules="flashrag"), score)
        for prediction, gold, noted in recorded(pattern)
        for name, score in noted.items()
    ]
    assert [row for row in compared if abs(row[3] - row[4]) >= 1e-9] == []
    assert (sum(1 for _ in recorded(pattern)), len(compared)) == (rows, scores)


@pytest.mark.parametrize(
    ("prediction", "gold", "f1", "em", "acc"),
    [
        ("yes it is", "yes", 0, 0, 1),
        ("the", "a", 0, 1, 1),
        ("anything", "The", 0, 0, 1),
        ("", "x", 0, 0, 0),
        ("U.S.", "US", 1, 1, 1),
        ("1,000", "1000", 1, 1, 1),
        ("O-Brien", "OBrien", 1, 1, 1),
        ("Café", "Cafe", 0, 0, 0),
        ("new new york", "new york", 0.8, 0, 1),
        ("in the north", "no", 0, 0, 1),
    ],
)
def test_flashrag_corner_cases(prediction: str, gold: str, f1: float, em: float, acc: float) -> None:
    scores = [METRICS[name](prediction, [gold], rules="flashrag") for name in ("f1", "em", "acc")]
    assert scores == pytest.approx([f1, em, acc])


@pytest.mark.parametrize(
    ("prediction", "gold", "f1", "em", "acc"),
    [
        ("the", "a", 1, 1, 1),  # both empty after normalising
        ("anything", "The", 0, 0, 0),  # an empty gold answer never matches
        ("", "x", 0, 0, 0),
        (None, "x", 0, 0, 0),
        (None, "The", 0, 0, 0),
        ("in the north", "no", 0, 0, 0),  # a word, not any substring
        ("I say no", "no", 0, 0, 1),
        ("yes it is", "yes", 0, 0, 1),
        ("noanswer", "noanswer", 1, 1, 1),
        ("yes", "Yes.", 1, 1, 1),
        ("New York, New York", "new york", 2 / 3, 0, 1),
        ("  The   U.S.\u2028Navy ", "us navy", 1, 1, 1),
    ],
)
def test_house_corner_cases(prediction: str | None, gold: str, f1: float, em: float, acc: float) -> None:
    scores = [METRICS[name](prediction, [gold]) for name in ("f1", "em", "acc")]
    assert scores == pytest.approx([f1, em, acc])


@given(hostile, st.lists(hostile, max_size=3))
def test_scores_lie_between_zero_and_one_and_agree_with_each_other(prediction: str, gold: list[str]) -> None:
    for rules in ("house", "flashrag"):
        em, f1, acc = (METRICS[name](prediction, gold, rules=rules) for name in ("em", "f1", "acc"))
        assert 0 <= f1 <= 1 and em in (0, 1) and acc in (0, 1) and em <= acc
    em, f1 = exact_match(prediction, gold), token_f1(prediction, gold)
    assert em <= f1
    assert em == 0 or cover_match(prediction, gold) == 1


PIECES = ["<query>", "</query>", "<query></answer>", "<", "<query", "[INST", " ", "the "]
PIECES += ["[A", "[a_", "]~", "[e~", "[/", "｜"]


@pytest.mark.parametrize("piece", PIECES)
def test_a_megabyte_of_anything_takes_linear_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    for function in (inert, partial(inert, tags=TAGS), one_line, lambda t: token_f1(t, ["x"])):
        start = time.process_time()
        function(text)
        assert time.process_time() - start < 10  # quadratic time would be hours


@given(hostile)
def test_inert_text_opens_no_tag_and_no_special_token(text: str) -> None:
    quoted = inert(text)
    assert inert(quoted) == quoted
    assert not re.search(r"<[/!?|\uff5c\u2581\w]", quoted)
    assert not re.search(r"\[/?INST\]", quoted)
    quoted.encode()


@given(hostile)
def test_the_policys_words_open_no_tag_but_the_formats(text: str) -> None:
    quoted = inert(text, tags=TAGS)
    assert inert(quoted, tags=TAGS) == quoted
    assert not re.search(r"<(?!/?(?:query|evidence|answer)>)[/!?|\uff5c\u2581\w]|\[/?INST\]", quoted)
    quoted.encode()


def test_plain_text_stays_as_it_is() -> None:
    text = "x < 5 > 3, a <- b, [1] [note] [citation needed] [US], 1\u20132, \u4f60\u597d\nline\u2028line"
    assert inert(text) == inert(text, tags=TAGS) == text


@given(st.text(st.characters()))
def test_valid_unicode_can_be_encoded_and_touches_nothing_else(text: str) -> None:
    cleaned = valid_unicode(text)
    assert len(cleaned) == len(text)
    assert all(new == old for old, new in zip(text, cleaned, strict=True) if not "\ud800" <= old <= "\udfff")
    cleaned.encode()


@given(hostile)
def test_one_line_is_one_line(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1 and line == line.strip() and "  " not in line
    assert one_line(line) == line
