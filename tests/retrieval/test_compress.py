from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from reasonrag.core.config import RetrievalConfig, load_config
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.pipeline.parts import open_questions, open_retriever
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.compress import CompressedRetriever, SentenceCompressor, compressed

JAWS = Passage(
    "jaws",
    "Jaws (film)\nJaws is a 1975 thriller. It was shot on Martha's Vineyard. Steven Spielberg directed Jaws. "
    "The music won an award.",
    2.5,
)
VERTIGO = Passage("vertigo", "Vertigo\nAlfred Hitchcock directed Vertigo. It is set in San Francisco.", 1.5)
LINE = Passage("line", "A single line without a title.", 0.5)


class Cutting:
    """Keeps the first word of a text, of as many texts as it is given or of `most`; notes what it is asked."""

    def __init__(self, most=None):
        self.asked, self.most = [], most

    async def compress(self, query, texts):
        self.asked.append((query, list(texts)))
        if self.most == 0:
            raise RuntimeError("out of memory")
        return [text.partition(" ")[0] for text in texts][: self.most]


def search(retriever, *queries, top_k=3):
    async def ask():
        async with aclosing(retriever):
            return await retriever.search(list(queries), top_k)

    return asyncio.run(ask())


def test_passages_are_shortened_and_keep_ids_titles_scores_and_order(tmp_path):
    inner = BM25Retriever.open([JAWS, VERTIGO, LINE], cache=tmp_path)
    cutting = Cutting()
    found = search(CompressedRetriever(inner, cutting, "first"), "directed Jaws", "single line")
    assert [[passage.id for passage in ranking] for ranking in found] == [["jaws", "vertigo"], ["line"]]
    assert [passage.contents for passage in found[0]] == ["Jaws (film)\nJaws", "Vertigo\nAlfred"]
    assert found[1][0].contents == "A"
    assert found[0][0].score > found[0][1].score > 0
    assert cutting.asked[0] == ("directed Jaws", [JAWS.text, VERTIGO.text])


def test_a_compressor_that_fails_is_no_empty_passage(tmp_path):
    for most, said in ((0, "out of memory"), (1, "1 texts for 2")):
        inner = BM25Retriever.open([JAWS, VERTIGO], cache=tmp_path)
        with pytest.raises(RetrievalError, match=said) as caught:
            search(CompressedRetriever(inner, Cutting(most), "first"), "directed")
        assert caught.value.cause == "compress"


def test_the_sentences_closest_to_the_query_stay_in_their_order():
    async def kept(keep, query):
        return await SentenceCompressor(None, keep).compress(query, [JAWS.text, LINE.text, ""])

    assert asyncio.run(kept(0.25, "who directed the film Jaws")) == ["Steven Spielberg directed Jaws.", LINE.text, ""]
    shot = asyncio.run(kept(0.5, "where was Jaws shot, and what award did the music win"))[0]
    assert shot == "It was shot on Martha's Vineyard. The music won an award."
    assert asyncio.run(kept(1.0, "anything"))[0] == JAWS.text


def test_a_run_with_compression_has_another_fingerprint_and_one_without_its_old_one(tmp_path):
    def opened(**retrieval):
        settings = {f"retrieval.{name}": value for name, value in retrieval.items()}
        config = load_config(overrides={"questions.dataset": "demo", "retrieval.cache": str(tmp_path), **settings})
        retriever = open_retriever(config, open_questions(config))
        (found,) = search(retriever, "Where is the capital?", top_k=2)
        return retriever.fingerprint, found

    plain, whole = opened()
    half, short = opened(compress="sentences")
    third, _ = opened(compress="sentences", compress_keep=0.3)
    assert len({plain, half, third}) == 3
    assert [passage.id for passage in short] == [passage.id for passage in whole]
    assert all(len(a.contents) <= len(b.contents) for a, b in zip(short, whole, strict=True))


def test_a_library_that_is_missing_is_named(tmp_path):
    inner = BM25Retriever.open([JAWS], cache=tmp_path)
    with pytest.raises(ConfigError, match="pip install selective-context"):
        compressed(inner, RetrievalConfig(compress="selective_context"))
    with pytest.raises(ConfigError, match="no other model"):
        compressed(inner, RetrievalConfig(compress="selective_context", compress_model="x"))
    assert compressed(inner, RetrievalConfig()) is inner


def test_recomp_writes_a_summary_of_each_passage(tmp_path):
    """A tiny random T5 stands for the compressor: what counts is that it is asked and its words are shown."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = ["<pad>", "</s>", "<unk>", *sorted(set(f"{JAWS.text} {VERTIGO.text}".split()))]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(words), decoder_start_token_id=0, **shape)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    inner = BM25Retriever.open([JAWS, VERTIGO], cache=tmp_path)
    settings = RetrievalConfig(compress="recomp", compress_model=str(tmp_path / "t5"))
    (found,) = search(compressed(inner, settings), "who directed Jaws")
    assert [(passage.id, passage.title) for passage in found] == [("jaws", "Jaws (film)"), ("vertigo", "Vertigo")]
    assert all(passage.text and set(passage.text.split()) <= set(words) for passage in found)
