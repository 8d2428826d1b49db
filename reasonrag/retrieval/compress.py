"""Shorten what a retriever found before a policy reads it: fewer words of each passage, and the same ids.

Passages are shortened one by one, so each keeps its id, its title and its place. The papers' rivals in this row shorten
all of them to one text (ReasonRAG, Table 2, "Summary"; with FlashRAG's settings, arXiv:2405.13576).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.text import one_line
from reasonrag.core.types import Passage
from reasonrag.core.watch import Worker
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.encoder_models import loading
from reasonrag.storage.files import short_hash

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\W_a-z])")


class Compressor(Protocol):
    """Shortens the texts of passages. Called by one task at a time."""

    async def compress(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return `[len(texts)]` shorter texts; "" where nothing is worth reading."""
        ...


class CompressedRetriever:
    """Shortens the passages of another retriever; everything else is that one's."""

    def __init__(self, inner: Retriever, compressor: Compressor, known: Any) -> None:
        """Wrap an open retriever; `known` is a JSON value that says what the compressor is, for the fingerprint."""
        self._inner = inner
        self._compressor = compressor
        self._turn = asyncio.Lock()
        self.fingerprint = short_hash([inner.fingerprint, known])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what some retrievers can do beside searching, such as `keep_in`

    async def check(self) -> None:
        """Check the retriever, if it can be checked."""
        if hasattr(self._inner, "check"):
            await self._inner.check()

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first, with their ids and scores.

        Raises:
            RetrievalError: the retriever failed, or the compressor did.
        """
        found = await self._inner.search(queries, top_k)
        return [await self._shortened(*each) for each in zip(queries, found, strict=True)]

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _shortened(self, query: str, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        try:
            async with self._turn:
                texts = await self._compressor.compress(query, [passage.text for passage in passages])
            if len(texts) != len(passages):
                raise RuntimeError(f"it gave {len(texts)} texts for {len(passages)} passages")
        except (RuntimeError, ValueError, MemoryError) as error:
            raise RetrievalError("the passages could not be compressed", quoting=error, cause="compress") from error
        shortened = []
        for passage, text in zip(passages, texts, strict=True):
            title, newline, _ = passage.contents.partition("\n")
            shortened.append(replace(passage, contents=(title + newline if newline else "") + one_line(text)))
        return tuple(shortened)


class SentenceCompressor:
    """Keeps the sentences of a passage that are closest to the query, in their order (RECOMP, arXiv:2310.04408)."""

    def __init__(self, encoder: str | None, keep: float) -> None:
        """Open the encoder, word counts if None. `keep` is the share of the sentences, rounded, and at least one.

        Raises:
            ConfigError: the encoder cannot be opened.
        """
        from reasonrag.retrieval.encoders import open_encoder

        self._encoder = open_encoder(encoder or "lexical")
        self._keep = keep

    async def compress(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the kept sentences of each text."""
        import numpy as np

        sentences = [_SENTENCE_END.split(text) for text in texts]
        vectors = np.array(await self._encoder.encode([query, *(one for of_text in sentences for one in of_text)]))
        similar = vectors[1:] @ vectors[0] / np.maximum(np.linalg.norm(vectors[1:], axis=1), 1e-9)
        kept, end = [], 0
        for of_text in sentences:
            start, end = end, end + len(of_text)
            best = np.argsort(-similar[start:end], kind="stable")[: max(1, round(self._keep * len(of_text)))]
            kept.append(" ".join(of_text[place] for place in sorted(best)))
        return kept


class LibraryCompressor:
    """Shortens text by text with another's function from query and text, in a thread."""

    def __init__(self, function: Callable[[str, str], str]) -> None:
        self._function = function
        self._thread = Worker("the compressor", RetrievalError)

    async def compress(self, query: str, texts: Sequence[str]) -> list[str]:
        """Return the function of each text that is not empty."""
        return [await self._thread.call(self._function, query, text) if text else "" for text in texts]


def compressed(retriever: Retriever, config: RetrievalConfig) -> Retriever:
    """Return a retriever that shortens what this one finds as `config.compress` says; this one if it is None.

    Raises:
        ConfigError: a library or a model is missing.
    """
    if config.compress is None:
        return retriever
    known = ["compress", config.compress, config.compress_model, config.compress_keep]
    return CompressedRetriever(retriever, _COMPRESSORS[config.compress](config), known)


def _recomp(config: RetrievalConfig) -> Compressor:
    """Open the abstractive compressor of RECOMP: a T5 that writes a summary of a passage for a question."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    name = config.compress_model or "fangyuan/nq_abstractive_compressor"
    with loading(f"compressor {name!r}"):
        tokenizer, model = (kind.from_pretrained(name) for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
    model.to(config.device or "cpu")
    tokenizer.split_special_tokens = True  # "</s>" in a passage is text

    def summary(query: str, text: str) -> str:
        asked = tokenizer(f"Question: {query}\n Document: {text}\n Summary: ", truncation=True, return_tensors="pt")
        written = model.generate(**asked.to(model.device), max_new_tokens=512, do_sample=False)
        return str(tokenizer.decode(written[0], skip_special_tokens=True))

    return LibraryCompressor(summary)


def _selective_context(config: RetrievalConfig) -> Compressor:
    """Open Selective-Context (arXiv:2310.06201): drops the phrases that GPT-2 expects, whatever is asked."""
    if config.compress_model:
        raise ConfigError("selective_context asks GPT-2 and no other model; leave retrieval.compress_model out")
    with loading("Selective-Context"):
        try:
            library: Any = import_module("selective_context")
        except ImportError as error:
            raise ConfigError("--compress selective_context needs a library; pip install selective-context") from error
        selective = library.SelectiveContext(model_type="gpt2", lang="en")
    return LibraryCompressor(lambda query, text: str(selective(text, reduce_ratio=1 - config.compress_keep)[0]))


_COMPRESSORS: dict[str, Callable[[RetrievalConfig], Compressor]] = {
    "sentences": lambda config: SentenceCompressor(config.compress_model, config.compress_keep),
    "recomp": _recomp,
    "selective_context": _selective_context,
}
