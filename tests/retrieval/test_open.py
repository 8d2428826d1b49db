"""Rankings that are fused by rank, and reordered by a tiny cross-encoder with random weights."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from contextlib import aclosing
from importlib.util import find_spec

import pytest

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.open import CrossEncoderReranker, HybridRetriever, RerankedRetriever, reciprocal_rank_fusion

needs_library = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)

A, B, C, D = (Passage(name, f"text of {name}", 7.0) for name in "abcd")
LETTERS = [Passage(letter, f"about {letter}") for letter in "abcdef"]
FILMS = [
    Passage(str(n), f"film {n}\nA film about {' and '.join(words)}.")
    for n, words in enumerate(
        [("sharks",), ("sharks", "ships"), ("monsters", "ships"), ("ships",), ("sharks", "monsters")]
    )
]


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


class ByScore:
    """Scores by table; counts the passages it is given."""

    def __init__(self, scores: dict[str, float], fingerprint: str = "table") -> None:
        self.scores = scores
        self.fingerprint = fingerprint
        self.asked: list[tuple[str, str]] = []

    def score(self, query, passages):
        self.asked.append((query, ids(passages)))
        return [self.scores[passage.id] for passage in passages if passage.id in self.scores]


def save_cross_encoder(folder, *, labels: int = 1, seed: int = 0):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "about", "and", "a", "sharks", "ships", "monsters"]
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate(words)}, model_max_length=32)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(words), max_position_embeddings=32, num_labels=labels, initializer_range=0.5, **shape)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    torch.set_num_threads(1)
    return save_cross_encoder(tmp_path_factory.mktemp("models") / "tiny")


def search(retriever, *queries, top_k=5):
    async def ask():
        async with aclosing(retriever):
            return await retriever.search(list(queries), top_k)

    return asyncio.run(ask())


# --- Fusion ---


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


# --- The order of a reranker ---


def test_what_was_found_is_ordered_by_the_reranker():
    reranker = ByScore({"a": 0.1, "b": 0.5, "c": 0.1, "d": 0.2, "e": 9.0})
    (ranking,) = search(RerankedRetriever(Fixed(*LETTERS), reranker, depth=4), "q", top_k=4)
    assert [(p.id, p.score) for p in ranking] == [("b", 0.5), ("d", 0.2), ("a", 0.1), ("c", 0.1)]
    assert reranker.asked == [("q", "abcd")]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_fails_the_search(bad):
    with pytest.raises(RetrievalError, match="a score that is not finite") as failed:
        search(RerankedRetriever(Fixed(*LETTERS[:2]), ByScore({"a": 1.0, "b": bad})), "q")
    assert failed.value.cause == "rerank"


def test_a_model_that_fails_fails_the_search():
    class Full(ByScore):
        def score(self, query, passages):
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RetrievalError, match="CUDA out of memory") as failed:
        search(RerankedRetriever(Fixed(*LETTERS), Full({})), "q")
    assert failed.value.cause == "rerank"


# --- A real cross-encoder ---


@needs_library
def test_scores_are_those_of_the_model(model):
    import torch
    from sentence_transformers import CrossEncoder

    query, pairs = "sharks and ships", [("sharks and ships", film.contents) for film in FILMS]
    logits = CrossEncoder(str(model), device="cpu").predict(pairs, activation_fn=torch.nn.Identity()).tolist()
    probabilities = CrossEncoder(str(model), device="cpu").predict(pairs).tolist()
    scores = CrossEncoderReranker(str(model), device="cpu").score(query, FILMS)
    assert scores == pytest.approx(logits, abs=1e-5)
    assert [1 / (1 + math.exp(-score)) for score in scores] == pytest.approx(probabilities, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 5
    assert search(RerankedRetriever(Fixed(), CrossEncoderReranker(str(model))), "q") == [()]


@needs_library
@pytest.mark.fault(
    "A5",
    "special tokens of a reranker in queries and passages",
    "scored as the characters that they are",
    before="read as special tokens",
)
def test_special_tokens_in_texts_are_text(model, figure):
    reranker, tokens = CrossEncoderReranker(str(model), device="cpu"), ("SEP", "CLS", "MASK", "PAD", "UNK")
    as_text = reranker.score("film [ SEP ] a", [Passage("p", f"sharks [ {token} ] ships") for token in tokens])
    scores = reranker.score("film [SEP] a", [Passage("p", f"sharks [{token}] ships") for token in tokens])
    same = sum(one == pytest.approx(other, abs=1e-5) for one, other in zip(scores, as_text, strict=True))
    figure(f"{same} of {len(tokens)} tokens scored as text")
    assert same == len(tokens)


@needs_library
def test_a_lone_surrogate_in_a_query_fails_nothing(model):
    reranker = CrossEncoderReranker(str(model), device="cpu")
    assert reranker.score("sharks \ud83d", FILMS) == reranker.score("sharks ?", FILMS)


@needs_library
def test_the_identity_is_of_the_weights_and_not_of_the_place(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("anything")
    other = save_cross_encoder(tmp_path / "other", seed=1)
    one, same, changed = (CrossEncoderReranker(str(path)).fingerprint for path in (model, copy, other))
    assert one == same != changed


@needs_library
def test_a_model_with_several_labels_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="3 labels"):
        CrossEncoderReranker(str(save_cross_encoder(tmp_path / "three", labels=3)))


@needs_library
def test_a_model_without_a_head_is_not_given_a_random_one(model, tmp_path):
    plain = shutil.copytree(model, tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(ConfigError, match=r"BertModel.*does not give a pair"):
        CrossEncoderReranker(str(plain))
