"""Which gold passages count as found."""

from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.types import Passage, Question
from reasonrag.retrieval.measure import gold_recall, with_gold_ids
from tests.retrieval.test_open import Fixed


def test_a_piece_counts_for_the_passage_that_was_split() -> None:
    question = Question("q", "who?", ("me",), "set", metadata={"gold_ids": ["a", "b#2"]})
    retriever = Fixed(*(Passage(id_, "x") for id_ in ("c", "a#3", "b", "b#2")))
    found = asyncio.run(gold_recall(retriever, [question], [1, 2, 3, 4]))
    assert found == {
        **{"any_gold@1": [0], "any_gold@2": [1], "any_gold@3": [1], "any_gold@4": [1]},
        **{"all_gold@1": [0], "all_gold@2": [0], "all_gold@3": [0], "all_gold@4": [1]},
    }


def test_questions_that_do_not_say_what_they_need_are_left_out_and_none_at_all_is_an_error() -> None:
    without = Question("a", "who?", ("me",), "set")
    having = Question("b", "who?", ("me",), "set", metadata={"gold_ids": [7]})
    assert with_gold_ids([without, having]) == [having]
    with pytest.raises(DataError, match=r"no question has metadata\.gold_ids"):
        with_gold_ids([without])
