from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.combined import HybridRetriever, reciprocal_rank_fusion
from reasonrag.retrieval.index.settings import BM25Config

A, B, C, D = (Passage(name, f"text of {name}", 7.0) for name in "abcd")
FILMS = [
    Passage("1", "Jaws\nJaws is a film about a shark."),
    Passage("2", "Steven Spielberg\nSteven Spielberg is the director of Jaws."),
    Passage("3", "Alien\nAlien is a film about a monster."),
]


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


class Meeting(Fixed):
    """Answers once all of its kind are asked."""

    barrier: asyncio.Barrier

    async def search(self, queries, top_k):
        async with asyncio.timeout(10), self.barrier:
            return await super().search(queries, top_k)


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


def test_all_are_asked_at_once():
    async def ask():
        Meeting.barrier = asyncio.Barrier(3)
        return await HybridRetriever([Meeting(A), Meeting(B), Meeting(C)]).search(["q"], 3)

    assert [ids(ranking) for ranking in asyncio.run(ask())] == ["abc"]


def test_one_that_fails_fails_the_search():
    hybrid = HybridRetriever([Fixed(A), Fixed(B, failure=RetrievalError("gone", cause="http_500"))])
    with pytest.raises(RetrievalError, match="gone") as failed:
        search(hybrid, "q")
    assert failed.value.cause == "http_500"


def test_real_indexes_are_fused(tmp_path):
    stemmed = BM25Retriever.open(FILMS, cache=tmp_path)
    plain = BM25Retriever.open(FILMS, cache=tmp_path, config=BM25Config(stemmer=None, k1=0.9, b=0.4))
    hybrid = HybridRetriever([stemmed, plain])
    queries = ["director of Jaws", "film about a monster", "", "nothing here"]

    async def compare():
        found, both = await hybrid.search(queries, 2), [await r.search(queries, 2) for r in (stemmed, plain)]
        await hybrid.aclose()
        await hybrid.aclose()
        return found, both

    found, both = asyncio.run(compare())
    assert found == [reciprocal_rank_fusion(rankings)[:2] for rankings in zip(*both, strict=True)]
    assert [ids(ranking)[:1] for ranking in found] == ["2", "3", "", ""]
