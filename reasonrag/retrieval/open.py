"""Open an index folder as a retriever: BM25 or dense, both fused by rank, reranked by a cross-encoder if asked for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.event_loop import Worker
from reasonrag.core.plugins import trusted
from reasonrag.core.settings import named_path
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage, as_finite
from reasonrag.retrieval.base import Ranking, Retriever
from reasonrag.retrieval.encoders import find_files, loading, require_dense
from reasonrag.retrieval.index import IndexFolder
from reasonrag.storage.files import read_json, short_hash

_RERANK_DEPTH = 20  # passages per query that a reranker reads
_FUSION_DEPTH = 100  # passages of each ranking that are fused
_K = 60


def open_index(config: RetrievalConfig, *, trust_remote_code: bool = False) -> Retriever:
    """Open the index in the folder `config.index`, checked and ready.

    The `kind` None is the best that the index has; `encoder`, `reranker`, `device` and `gpu` set how it
    is searched. None of them is needed for an index that was built on this machine.

    Raises:
        DataError: the index is missing, or one of its files is missing or damaged.
        ConfigError: the index has no such kind, or a library that it needs is not installed.
    """
    index = IndexFolder(named_path(str(config.index)))
    index.need("passages")
    available = kinds(index)
    if not available:
        raise ConfigError(f"{index.path} has passages and no search index; run index build with a --kind")
    kind = config.kind or available[0]
    if kind not in available:
        raise ConfigError(f"{index.path} cannot be searched by {kind!r}; it has {', '.join(available)}")
    retrievers: list[Retriever] = []
    if kind in ("bm25", "hybrid"):
        from reasonrag.retrieval.bm25 import BM25Retriever

        retrievers.append(BM25Retriever(index))
    if kind in ("dense", "hybrid"):
        from reasonrag.retrieval.dense import DenseRetriever

        dense = DenseRetriever(
            index, config.encoder, gpu=config.gpu, device=config.device, trust_remote_code=trust_remote_code
        )
        retrievers.append(dense)
    retriever = HybridRetriever(retrievers) if len(retrievers) > 1 else retrievers[0]
    if config.reranker is None:
        return retriever
    reranker = CrossEncoderReranker(config.reranker, device=config.device, trust_remote_code=trust_remote_code)
    return RerankedRetriever(retriever, reranker)


def kinds(index: IndexFolder) -> list[str]:
    """Return the kinds of search that an index has the parts for, the best first."""
    parts = index.parts()
    available = [kind for kind, part in (("dense", "embeddings"), ("bm25", "bm25")) if part in parts]
    return ["hybrid", *available] if len(available) > 1 else available


def reciprocal_rank_fusion(rankings: Sequence[Ranking], *, k: int = _K) -> Ranking:
    """Rank the passages of all rankings by their sum of 1 / (k + rank), ranks from 1 (Cormack et al., SIGIR 2009).

    The scores of the rankings are ignored, so they need no common scale. Passages with the same id are one passage; if
    a ranking has it twice, its better rank counts. Equal sums keep the order of the first ranking, then of the next.

    >>> both = reciprocal_rank_fusion([(Passage("a", ""), Passage("b", "")), (Passage("b", ""),)], k=1)
    >>> [(passage.id, round(passage.score, 3)) for passage in both]
    [('b', 0.833), ('a', 0.5)]
    """
    passages: dict[str, Passage] = {}
    shares: dict[str, list[float]] = {}
    for ranking in rankings:
        ranks: dict[str, int] = {}
        for rank, passage in enumerate(ranking, 1):
            passages.setdefault(passage.id, passage)
            ranks.setdefault(passage.id, rank)
        for passage_id, rank in ranks.items():
            shares.setdefault(passage_id, []).append(1 / (k + rank))
    # An exact sum: the same ranks in another order of the rankings are a tie, not a difference in the last digit.
    fused = [replace(passage, score=math.fsum(shares[passage_id])) for passage_id, passage in passages.items()]
    return tuple(sorted(fused, key=lambda passage: -passage.score))


class HybridRetriever:
    """Searches with several retrievers over one corpus at the same time and fuses their rankings."""

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        """Wrap open retrievers over passages with the same ids; they are closed with this one."""
        self._retrievers = retrievers
        self.fingerprint = short_hash([[retriever.fingerprint for retriever in retrievers], _FUSION_DEPTH, _K])

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return rankings as `Retriever` does; RetrievalError if one of the retrievers failed."""
        depth = max(_FUSION_DEPTH, top_k)
        of_each = await asyncio.gather(*(retriever.search(queries, depth) for retriever in self._retrievers))
        return [reciprocal_rank_fusion(rankings)[:top_k] for rankings in zip(*of_each, strict=True)]

    async def aclose(self) -> None:
        await asyncio.gather(*(retriever.aclose() for retriever in self._retrievers))


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, such as cross-encoder/ms-marco-MiniLM-L6-v2."""

    def __init__(self, name_or_path: str, *, device: str | None = None, trust_remote_code: bool = False) -> None:
        """Load the model from the Hub or a folder, to the best device if none is given.

        Raises:
            ConfigError: sentence-transformers is missing, the model cannot be found, or it does not score pairs.
        """
        require_dense(f"reranker {name_or_path!r}")
        files = find_files(name_or_path)
        with loading(f"reranker {files.name!r}"):
            self._model = import_module("sentence_transformers").CrossEncoder(
                str(files.folder),
                device=device,
                trust_remote_code=trusted(files.name, trust_remote_code),
                local_files_only=True,
            )
        # A model that was not trained to score pairs gets a random head without an error.
        architectures = str((read_json(files.folder / "config.json") or {}).get("architectures"))
        is_trained = (files.folder / "modules.json").exists() or "ForSequenceClassification" in architectures
        if not is_trained or self._model.num_labels != 1:
            raise ConfigError(
                f"{files.name!r} ({architectures}, {self._model.num_labels} labels) does not give a pair of texts one "
                "score; choose a cross-encoder as the reranker"
            )
        self._model.tokenizer.split_special_tokens = True  # "[SEP]" in a passage is text
        self.fingerprint = short_hash([files.checksum(), None])

    def score(self, query: str, passages: Ranking) -> list[float]:
        """Return `[len(passages)]` logits of any size, higher is better. Called from one thread at a time."""
        from torch.nn import Identity

        # No sigmoid, because good passages would all become 1.0 in half precision.
        pairs = [(valid_unicode(query), passage.contents) for passage in passages]  # tokenizers refuse lone surrogates
        scores: list[float] = self._model.predict(pairs, activation_fn=Identity(), show_progress_bar=False).tolist()
        return scores


class RerankedRetriever:
    """Reorders the first passages of another retriever."""

    def __init__(self, inner: Retriever, reranker: CrossEncoderReranker, depth: int = _RERANK_DEPTH) -> None:
        """Wrap an open retriever, which is closed with this one.

        Per query, `depth` passages are scored, or `top_k` of a search if that is more.
        """
        self._inner = inner
        self._reranker = reranker
        self._depth = depth
        self._thread = Worker("the reranker")
        self.fingerprint = short_hash([inner.fingerprint, reranker.fingerprint, depth])

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return rankings as `Retriever` does, equal scores in their order; RetrievalError if the reranker failed."""
        # More than are returned: the reranker finds passages that the search placed low.
        rankings = await self._inner.search(queries, max(self._depth, top_k))
        reordered = []
        for query, passages in zip(queries, rankings, strict=True):
            ordered = await self._thread.call(self._ordered, query, passages) if passages else ()
            reordered.append(ordered[:top_k])
        return reordered

    async def aclose(self) -> None:
        """Wait for the scoring in progress, then close the retriever."""
        await self._thread.aclose()
        await self._inner.aclose()

    def _ordered(self, query: str, passages: Ranking) -> Ranking:
        try:
            scores = self._reranker.score(query, passages)
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError("the reranker failed", quoting=error, cause="rerank") from error
        if None in map(as_finite, scores):
            raise RetrievalError("the reranker gave a passage a score that is not finite", cause="rerank")
        scored = [replace(passage, score=score) for passage, score in zip(passages, scores, strict=True)]
        return tuple(sorted(scored, key=lambda passage: -passage.score))
