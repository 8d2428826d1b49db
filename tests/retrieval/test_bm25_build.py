"""BM25 from chunks on disk scores as bm25s does from memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonrag.core.types import Passage
from reasonrag.retrieval.bm25 import Tokenizer, build_bm25
from reasonrag.retrieval.index import BM25Config, IndexFolder, Manifest, PassagesConfig, Silent
from reasonrag.retrieval.passages import GivenCorpus, build_passages
from tests.retrieval.forked import forked

WORDS = st.sampled_from(["film", "films", "Spielberg", "directed", "Pál", "pal", "X", "of", "the", "2001", "東京", "_"])
TEXTS = st.lists(st.lists(WORDS, min_size=1, max_size=12).map(" ".join), min_size=1, max_size=30)


def build(folder: Path, texts: list[str], chosen: BM25Config = BM25Config(), **options: Any) -> Manifest:  # noqa: B008
    index = IndexFolder(folder)
    passages = [Passage(str(row), text) for row, text in enumerate(texts)]
    with index.locked():
        build_passages(index, GivenCorpus("given", passages), PassagesConfig(), progress=Silent())
        return build_bm25(index, chosen, **{"max_bytes": 1 << 20, "progress": Silent(), **options})


def expected(texts: list[str], chosen: BM25Config) -> bm25s.BM25:
    whole = bm25s.BM25(k1=chosen.k1, b=chosen.b, method="lucene", backend="numpy")
    whole.index(list(map(Tokenizer(chosen).words, texts)), show_progress=False)
    return whole


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS, chunk=st.integers(1, 8), max_bytes=st.integers(1, 2000), stemmer=st.sampled_from(["english", None]))
def test_every_score_is_the_one_that_bm25s_computes(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk: int, max_bytes: int, stemmer: str | None
) -> None:
    chosen = BM25Config(stemmer=stemmer, k1=0.9, b=0.4)
    if not any(map(Tokenizer(chosen).words, texts)):
        return
    folder = tmp_path_factory.mktemp("index")
    manifest = build(folder, texts, chosen, chunk=chunk, max_bytes=max_bytes)
    ours, whole = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False), expected(texts, chosen)
    words = {word for text in texts for word in Tokenizer(chosen).words(text)}
    assert set(ours.vocab_dict) == words
    for word in words:
        np.testing.assert_allclose(ours.get_scores([word]), whole.get_scores([word]), rtol=0, atol=1e-6)
    assert manifest.counts == {"passages": len(texts), "words": len(words), "postings": len(whole.scores["data"])}


class Deadly(Silent):
    """Kills its process after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def advance(self, amount: float = 1.0) -> None:
        self.steps -= 1
        if not self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def build_until_killed(index: IndexFolder, steps: int) -> None:
    with index.locked():
        build_bm25(index, BM25Config(), max_bytes=4000, progress=Deadly(steps), chunk=16)


def test_a_build_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    texts = [f"common word{i % 7} number {i}" for i in range(100)]
    whole = build(tmp_path / "whole", texts, chunk=16)
    index = IndexFolder(tmp_path / "killed")
    given = GivenCorpus("given", [Passage(str(row), text) for row, text in enumerate(texts)])
    build_passages(index, given, PassagesConfig(), progress=Silent())
    for steps in (2, 4, 4):  # while words are cut, at the end of that, while scores are merged
        assert forked(build_until_killed, index, steps) == -signal.SIGKILL
    assert forked(build_until_killed, index, -1) == 0
    assert index.need("bm25") == whole
    assert sorted(path.name for path in (index.path / "bm25").iterdir()) == sorted([*whole.files, "manifest.json"])
