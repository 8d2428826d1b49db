"""Rankings that are fused by rank."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import DataError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.bm25 import build_bm25
from reasonrag.retrieval.index import BM25Config, Silent
from reasonrag.retrieval.open import HybridRetriever, open_index, reciprocal_rank_fusion
from reasonrag.retrieval.passages import PASSAGES
from reasonrag.storage.files import read_json, short_hash, size_and_digest
from tests.retrieval.toys import passages, sentences

A, B, C, D = (Passage(name, f"text of {name}", 7.0) for name in "abcd")


class Fixed:
    """Always the same ranking, or failure."""

    def __init__(self, *passages: Passage, fingerprint: str = "fixed", failure: Exception | None = None) -> None:
        self.passages = passages
        self.fingerprint = fingerprint
        self.failure = failure

    async def search(self, queries, top_k):
        if self.failure:
            raise self.failure
        return [self.passages[:top_k] if query else () for query in queries]

    async def aclose(self):
        pass


def ids(ranking) -> str:
    return "".join(passage.id for passage in ranking)


def search(retriever, *queries, top_k=5):
    async def ask():
        async with aclosing(retriever):
            return await retriever.search(list(queries), top_k)

    return asyncio.run(ask())


def test_a_passage_is_scored_by_its_ranks_alone():
    fused = reciprocal_rank_fusion([(A, B, C), (C, D)])
    scores = {"c": 1 / 63 + 1 / 61, "a": 1 / 61, "b": 1 / 62, "d": 1 / 62}
    assert {passage.id: passage.score for passage in fused} == pytest.approx(scores)
    assert [p.contents for p in fused] == [p.contents for p in (C, A, B, D)]


def test_equal_sums_stand_in_the_order_of_the_first_ranking():
    assert ids(reciprocal_rank_fusion([(A, B), (B, A)])) == "ab"
    assert ids(reciprocal_rank_fusion([(B, A), (A, B)])) == "ba"
    assert ids(reciprocal_rank_fusion([(A,), (B,), (C,)])) == "abc"


def test_one_that_fails_fails_the_search():
    hybrid = HybridRetriever([Fixed(A), Fixed(B, failure=RetrievalError("gone", cause="http_500"))])
    with pytest.raises(RetrievalError, match="gone"):
        search(hybrid, "q")


@pytest.mark.parametrize(
    ("part", "name"), [("passages", PASSAGES), ("bm25", "data.csc.index.npy"), ("bm25", "vocab.index.json")]
)
def test_an_index_made_so_that_its_checksums_agree_is_told_in_one_line(part, name, tmp_path):
    index = passages(tmp_path / "index", sentences(20))
    with index.locked():
        build_bm25(index, BM25Config(), progress=Silent())
    (index.path / part / name).write_bytes(b"[]" if name.endswith("json") else b"")
    path = index.path / part / "manifest.json"
    manifest = read_json(path)
    manifest["files"][name] = size_and_digest(index.path / part / name)
    made = short_hash({key: value for key, value in manifest.items() if key != "fingerprint"})
    path.write_text(json.dumps(manifest | {"fingerprint": made}))
    if part == "passages":
        other = index.path / "bm25" / "manifest.json"
        of_bm25 = read_json(other) | {"made_of": {"passages": made}}
        del of_bm25["fingerprint"]
        other.write_text(json.dumps(of_bm25 | {"fingerprint": short_hash(of_bm25)}))
    with pytest.raises(DataError, match="files of bm25 are not what they say"):
        open_index(RetrievalConfig(index=str(index.path), kind="bm25"))
