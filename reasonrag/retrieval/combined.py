"""Combine searches: fuse the rankings of several retrievers by rank, or rerank one with a cross-encoder."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Protocol

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.event_loop import Worker
from reasonrag.core.plugins import trusted
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage, as_finite
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.encoders import find_files, loading, require_dense
from reasonrag.storage.files import short_hash

_DEPTH = 100  # passages of each ranking that are fused
_K = 60


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Passage]], *, k: int = _K) -> tuple[Passage, ...]:
    """Rank the passages of all rankings by their sum of 1 / (k + rank), ranks from 1 (Cormack et al., SIGIR 2009).

    The scores of the rankings are ignored, so they need no common scale. Passages with the same id are one passage; if
    a ranking has it twice, its better rank counts. Equal sums keep the order of the first ranking, then of the next.

    Args:
        rankings: `[retrievers]` rankings of any length, best first.
        k: 1 or more; the larger it is, the less the first ranks outweigh the later ones.

    Returns:
        Best first; `Passage.score` is the sum.

    >>> both = reciprocal_rank_fusion([[Passage("a", ""), Passage("b", "")], [Passage("b", "")]], k=1)
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
        self._retrievers = tuple(retrievers)
        self.fingerprint = short_hash([[retriever.fingerprint for retriever in retrievers], _DEPTH, _K])

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first.

        Raises:
            RetrievalError: one of the retrievers failed; the rankings of the others are then discarded.
        """
        depth = max(_DEPTH, top_k)
        of_each = await asyncio.gather(*(retriever.search(queries, depth) for retriever in self._retrievers))
        return [reciprocal_rank_fusion(rankings)[: max(top_k, 0)] for rankings in zip(*of_each, strict=True)]

    async def aclose(self) -> None:
        await asyncio.gather(*(retriever.aclose() for retriever in self._retrievers))


class Reranker(Protocol):
    """Scores how well passages answer a query. Called from one thread at a time."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same query and passage may get another score."""
        ...

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        """Return `[len(passages)]` scores, higher is better. Scores of two queries need not be comparable."""
        ...


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, such as cross-encoder/ms-marco-MiniLM-L6-v2."""

    def __init__(self, name_or_path: str, *, device: str | None = None, trust_remote_code: bool = False) -> None:
        """Load the model from the Hub or a folder, to the best device if none is given.

        Raises:
            ConfigError: sentence-transformers is missing, the model cannot be found, or it does not score pairs.
        """
        require_dense(f"reranker {name_or_path!r}", otherwise="leave the reranker out")
        files = find_files(name_or_path)
        architectures = list(map(str, files.config().get("architectures") or []))
        # A model that was not trained to score pairs would get a random head without an error.
        if not files.has_modules() and not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ConfigError(
                f"{files.name!r} ({', '.join(architectures) or 'no architecture'}) does not score pairs of texts; "
                "choose a cross-encoder as the reranker"
            )
        with loading(f"reranker {files.name!r}"):
            self._model = import_module("sentence_transformers").CrossEncoder(
                str(files.folder),
                device=device,
                trust_remote_code=trusted(files.name, trust_remote_code),
                local_files_only=True,
            )
        self._model.tokenizer.split_special_tokens = True  # "[SEP]" in a passage is text
        if self._model.num_labels != 1:
            raise ConfigError(
                f"{files.name!r} classifies pairs into {self._model.num_labels} classes; a reranker gives a pair one "
                "score"
            )
        self.fingerprint = short_hash([files.checksum(), None])

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        """Return `[len(passages)]` logits of any size, higher is better."""
        if not passages:
            return []
        from torch.nn import Identity

        # No sigmoid, because good passages would all become 1.0 in half precision.
        pairs = [(valid_unicode(query), passage.contents) for passage in passages]  # tokenizers refuse lone surrogates
        scores: list[float] = self._model.predict(pairs, activation_fn=Identity(), show_progress_bar=False).tolist()
        return scores


class RerankedRetriever:
    """Reorders the first passages of another retriever."""

    def __init__(self, inner: Retriever, reranker: Reranker, depth: int = 20) -> None:
        """Wrap an open retriever, which is closed with this one.

        Per query, `depth` passages are scored, or `top_k` of a search if that is more.
        """
        self._inner = inner
        self._reranker = reranker
        self._depth = depth
        self._thread = Worker("the reranker")
        self.fingerprint = short_hash([inner.fingerprint, reranker.fingerprint, depth])

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first; equal scores keep their order.

        Raises:
            RetrievalError: the retriever failed, or the reranker did.
        """
        rankings = await self._inner.search(queries, max(self._depth, top_k))
        reordered = []
        for query, passages in zip(queries, rankings, strict=True):
            ordered = await self._thread.call(self._ordered, query, passages)
            reordered.append(ordered[: max(top_k, 0)])
        return reordered

    async def aclose(self) -> None:
        """Wait for the scoring in progress, then close the retriever."""
        await self._thread.aclose()
        await self._inner.aclose()

    def _ordered(self, query: str, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        if not passages:
            return ()
        try:
            scores = self._reranker.score(query, passages)
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError("the reranker failed", quoting=error, cause="rerank") from error
        bad = [as_finite(score) for score in scores].count(None)
        if bad or len(scores) != len(passages):
            raise RetrievalError(
                f"the reranker gave {len(scores)} scores for {len(passages)} passages, {bad} of them not finite",
                cause="rerank",
            )
        scored = [replace(passage, score=score) for passage, score in zip(passages, scores, strict=True)]
        return tuple(sorted(scored, key=lambda passage: -passage.score))
