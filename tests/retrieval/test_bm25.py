"""BM25: the same ranking every time, and an index on disk that is never trusted blindly."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.types import Passage
from reasonrag.retrieval.bm25 import BM25Retriever, Tokenizer
from reasonrag.retrieval.index import BM25Config, IndexFolder
from tests.retrieval.test_index import delete, flip, truncate

PASSAGES = (
    Passage("jaws", "Jaws\nJaws is a film that Steven Spielberg directed."),
    Passage("ed", "Ed Wood\nEd Wood directed films of his own."),
    Passage("gabor", "Pál Gábor\nA Hungarian\u2028director, 3.5 million seen."),
    Passage("twin1", "Twin\nIdentical words here."),
    Passage("twin2", "Twin\nIdentical words here."),
)


class InRanges(BM25Retriever):
    """Scores three passages at a time, as a corpus of millions is scored."""

    _range = 3


def ids(retriever: BM25Retriever, queries: Sequence[str], top_k: int = 5) -> list[list[str]]:
    return [[p.id for p in ranking] for ranking in asyncio.run(retriever.search(queries, top_k))]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> BM25Retriever:
    return BM25Retriever.open(PASSAGES, cache=tmp_path_factory.mktemp("shared"))


def test_passages_come_best_first_with_their_scores_and_exact_contents(retriever: BM25Retriever) -> None:
    (ranking,) = asyncio.run(retriever.search(["film directed by Spielberg"], 5))
    assert [p.id for p in ranking] == ["jaws", "ed"]
    assert ranking[0].score > ranking[1].score > 0
    assert [p.contents for p in ranking] == [PASSAGES[0].contents, PASSAGES[1].contents]


def test_case_accents_and_endings_do_not_matter(retriever: BM25Retriever) -> None:
    assert ids(retriever, ["pal GABOR", "directing"]) == [["gabor"], ["jaws", "ed"]]


def test_texts_without_spaces_are_found_by_their_signs(tmp_path: Path) -> None:
    texts = {
        "film": "\u7ea2\u9ad8\u7cb1\n\u5f20\u827a\u8c0b\u5bfc\u6f14\u4e86\u8fd9\u90e8\u7535\u5f71\u3002",
        "town": "\u5317\u4eac\n\u5317\u4eac\u662f\u9996\u90fd\u3002",
        "tower": "\u6771\u4eac\u30bf\u30ef\u30fc",
    }
    passages = [Passage(name, text) for name, text in texts.items()]
    opened = BM25Retriever.open(passages, cache=tmp_path)
    queries = [
        "\u8c01\u5bfc\u6f14\u4e86\u300a\u7ea2\u9ad8\u7cb1\u300b?",
        "\u5317\u4eac\u5728\u54ea",
        "\u30bf\u30ef\u30fc",
    ]
    assert [found[0] for found in ids(opened, queries)] == ["film", "town", "tower"]
    spaced = Tokenizer(BM25Config(), spaced=True)  # of an index that was built before
    assert spaced.words("\u5f20\u827a\u8c0b Zhang") == ["\u5f20\u827a\u8c0b", "zhang"]


@pytest.mark.parametrize("query", ["", "  ", "the of and", "?!", "unheard", "\x00", "\ud83d", "\u2028"])
def test_a_query_that_shares_no_word_finds_nothing(retriever: BM25Retriever, query: str) -> None:
    assert ids(retriever, [query, "jaws"]) == [[], ["jaws"]]


def test_ties_stand_in_the_order_of_the_corpus_whatever_top_k(tmp_path: Path) -> None:
    passages = [Passage(str(i), "same words") for i in range(500)]
    retriever = BM25Retriever.open(passages, cache=tmp_path)
    for top_k in (1, 2, 7, 499, 500, 10_000):
        assert ids(retriever, ["words"], top_k) == [[str(i) for i in range(min(top_k, 500))]]


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=40
    ),
    query=st.lists(st.sampled_from("abcdefghi"), min_size=1, max_size=5).map(" ".join),
    top_k=st.integers(1, 45),
)
def test_the_ranking_is_that_of_all_scores_sorted(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], query: str, top_k: int
) -> None:
    passages = [Passage(str(row), text) for row, text in enumerate(texts)]
    whole = bm25s.BM25(k1=1.2, b=0.75, method="lucene", backend="numpy")
    whole.index([text.split() for text in texts], show_progress=False)
    words = [word for word in query.split() if word in whole.vocab_dict]
    scores = whole.get_scores(words) if words else []
    expected = sorted((-score, row) for row, score in enumerate(scores) if score > 0)[:top_k]
    cache, config = tmp_path_factory.mktemp("cache"), BM25Config(stemmer=None, stopwords=None)
    for kind in (BM25Retriever, InRanges):
        (ranking,) = asyncio.run(kind.open(passages, cache=cache, config=config).search([query], top_k))
        assert [(p.id, p.score) for p in ranking] == [(str(row), -score) for score, row in expected]


def test_a_cache_that_cannot_be_written_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(RunError, match=r"cannot hold a search index .*; choose another one for retrieval\.cache"):
        BM25Retriever.open(PASSAGES, cache=tmp_path / "cache")


def test_fingerprint_follows_corpus_and_settings(tmp_path: Path) -> None:
    def fingerprint(passages: Sequence[Passage] = PASSAGES, **settings: object) -> str:
        return BM25Retriever.open(passages, cache=tmp_path, config=BM25Config.model_validate(settings)).fingerprint

    prints = {
        fingerprint(),
        fingerprint(PASSAGES[:-1]),
        fingerprint(PASSAGES[::-1]),
        fingerprint(stemmer=None),
        fingerprint(stopwords=None),
        fingerprint(k1=0.9),
        fingerprint(b=0.4),
    }
    assert len(prints) == 7
    assert fingerprint() in prints


def test_fingerprint_does_not_follow_where_corpus_and_index_lie(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.jsonl").write_text(rows)
    one = BM25Retriever.open(tmp_path / "a/a.jsonl", cache=tmp_path / "a/cache")
    other = BM25Retriever.open(tmp_path / "b/b.jsonl", cache=tmp_path / "b/cache")
    assert one.fingerprint == other.fingerprint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with an index that tests take a copy of."""
    cache = tmp_path_factory.mktemp("whole")
    BM25Retriever.open(PASSAGES, cache=cache)
    return cache


# Every kind of damage is seen in tests/retrieval/test_index.py, flipped bits of every file in tests/e2e.
@pytest.mark.parametrize(
    ("name", "damage"),
    [("bm25/manifest.json", delete), ("bm25/data.csc.index.npy", truncate), ("passages/offsets.bin", flip)],
)
def test_a_damaged_cache_is_built_again_and_a_damaged_index_is_refused(
    whole: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    before = {path.relative_to(folder): path.read_bytes() for path in folder.glob("[!.]*/*")}
    damage(folder / name)
    with pytest.raises(DataError) as caught:
        BM25Retriever(IndexFolder(folder))
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert ids(BM25Retriever.open(PASSAGES, cache=tmp_path), ["spielberg", "twin"]) == [["jaws"], ["twin1", "twin2"]]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert before == {path.relative_to(folder): path.read_bytes() for path in folder.glob("[!.]*/*")}


def test_a_bad_corpus_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n{"id": "1", "contents": "y"}\n')
    with pytest.raises(DataError, match="duplicate id"):
        BM25Retriever.open(corpus, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="no passage of the corpus holds a word"):
        BM25Retriever.open([Passage("1", "the ?")], cache=tmp_path / "cache")


def test_what_a_policy_repeats_for_ever_holds_nobody_up(retriever: BM25Retriever) -> None:
    endless, patient = ids(retriever, ["film " * 300_000 + "twin", "film"], 2)
    assert endless == patient


def test_jax_stays_out_of_a_process_that_searches(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('imported')", encoding="utf-8")
    program = "from reasonrag.retrieval.bm25 import BM25Retriever; print('searches'); import jax"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["searches", "imported"]
