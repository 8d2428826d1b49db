"""Shorter passages: keep the sentences that are closest to the query (RECOMP, arXiv:2310.04408).

    reasonrag eval --retriever python:contrib.compress:open_retriever --index indexes/mine \
        --set retrieval.backend.keep=0.5 ...

Passages keep their ids, titles and places. Options: inner (how to search, as --retriever), keep (share of the sentences
that stay), model (an encoder such as fangyuan/nq_extractive_compressor; default: word counts).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from reasonrag import Config, Passage, Question, RetrievalError, Retriever
from reasonrag import open_retriever as open_inner

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\W_a-z])")

Shorten = Callable[[str, str], str]  # from a query and the text of a passage


class CompressedRetriever:
    """Shortens the passages that another retriever finds."""

    def __init__(self, inner: Retriever, shorten: Shorten, known: object) -> None:
        self._inner, self._shorten = inner, shorten
        self._one_at_a_time = asyncio.Lock()
        identity = json.dumps([inner.fingerprint, known], sort_keys=True)
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        rankings = await self._inner.search(queries, top_k)
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._shortened, queries, rankings)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _shortened(self, queries: Sequence[str], rankings: list[tuple[Passage, ...]]) -> list[tuple[Passage, ...]]:
        shortened = []
        for query, ranking in zip(queries, rankings, strict=True):
            try:
                texts = [" ".join(self._shorten(query, passage.text).split()) for passage in ranking]
            except (RuntimeError, ValueError, MemoryError) as error:
                raise RetrievalError("the passages could not be compressed", quoting=error, cause="compress") from error
            passages = []
            for passage, text in zip(ranking, texts, strict=True):
                title, newline, _ = passage.contents.partition("\n")
                passages.append(replace(passage, contents=f"{title}\n{text}" if newline else text))
            shortened.append(tuple(passages))
        return shortened


def open_retriever(config: Config, questions: list[Question]) -> CompressedRetriever:
    """Open the retriever of the option `inner`, and shorten what it finds."""
    options = config.retrieval.backend
    update: dict[str, object] = {"kind": options.get("inner"), "backend": {}}
    inner = open_inner(config.model_copy(update={"retrieval": config.retrieval.model_copy(update=update)}), questions)
    return CompressedRetriever(inner, closest_sentences(options.get("model"), float(options.get("keep", 0.5))), options)


def closest_sentences(model: str | None, keep: float) -> Shorten:
    """Return a function that keeps this share of the sentences, at least one, by cosine with the query, in order."""
    encode = _count_words
    if model:
        from sentence_transformers import SentenceTransformer

        encode = SentenceTransformer(model).encode

    def shorten(query: str, text: str) -> str:
        sentences = _SENTENCE_END.split(text)
        vectors = np.asarray(encode([query, *sentences]))
        similar = vectors[1:] @ vectors[0] / np.maximum(np.linalg.norm(vectors[1:], axis=1), 1e-9)
        best = np.argsort(-similar, kind="stable")[: max(1, round(keep * len(sentences)))]
        return " ".join(sentences[place] for place in sorted(best))

    return shorten


def _count_words(texts: Sequence[str]) -> np.ndarray:
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    words = sorted(set().union(*counts))
    return np.array([[count[word] for word in words] for count in counts], dtype=np.float32)
