from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.open import HybridRetriever, reciprocal_rank_fusion

A, B, C, D = (Passage(name, f"text of {name}", 7.0) for name in "abcd")


class Fixed:
    """Always the same ranking, and what was asked of it."""

    def __init__(self, *passages: Passage, fingerprint: str = "fixed", failure: Exception | None = None) -> None:
        self.passages = passages
        self.fingerprint = fingerprint
        self.failure = failure
        self.asked: list[tuple[list[str], int]] = []
        self.is_closed = False

    async def search(self, queries, top_k):
        self.asked.append((list(queries), top_k))
        if self.failure:
            raise self.failure
        return [self.passages[:top_k] if query else () for query in queries]

    async def aclose(self):
        self.is_closed = True


def ids(ranking) -> str:
    return "".join(passage.id for passage in ranking)


def search(retriever, *queries, top_k=5):
    return asyncio.run(retriever.search(list(queries), top_k))


# The formula


def test_a_passage_is_scored_by_its_ranks_alone():
    fused = reciprocal_rank_fusion([(A, B, C), (C, D)])
    assert [(p.id, p.score) for p in fused] == [
        ("c", pytest.approx(1 / 63 + 1 / 61)),
        ("a", pytest.approx(1 / 61)),
        ("b", pytest.approx(1 / 62)),
        ("d", pytest.approx(1 / 62)),
    ]
    assert [p.contents for p in fused] == [p.contents for p in (C, A, B, D)]


def test_equal_sums_stand_in_the_order_of_the_first_ranking():
    assert ids(reciprocal_rank_fusion([(A, B), (B, A)])) == "ab"
    assert ids(reciprocal_rank_fusion([(B, A), (A, B)])) == "ba"
    assert ids(reciprocal_rank_fusion([(A,), (B,), (C,)])) == "abc"


# The retriever


def test_one_that_fails_fails_the_search():
    hybrid = HybridRetriever([Fixed(A), Fixed(B, failure=RetrievalError("gone", cause="http_500"))])
    with pytest.raises(RetrievalError, match="gone") as failed:
        search(hybrid, "q")
    assert failed.value.cause == "http_500"
