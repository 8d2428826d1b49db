"""Open an index folder as a retriever: BM25, dense, or both fused by rank."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Ranking, Retriever
from reasonrag.retrieval.index import IndexFolder
from reasonrag.storage.files import short_hash

_FUSION_DEPTH = 100  # passages of each ranking that are fused
_K = 60


def open_index(config: RetrievalConfig, *, trust_remote_code: bool = False) -> Retriever:
    """Open the index in the folder `config.index`, checked and ready.

    The `kind` None is the best that the index has; `encoder`,
    `device` and `gpu` set how it is searched. None of them is
    needed for an index that was built on this machine.

    Raises:
        DataError: the index is missing, or one of its files is missing or damaged.
        ConfigError: the index has no such kind, or a library that it needs is not installed.
    """
    index = IndexFolder(named_path(str(config.index)))
    index.need("passages")
    if not (available := kinds(index)):
        raise ConfigError(f"{index.path} has passages and no search index; run index build with a --kind")
    kind = config.kind or available[0]
    if kind not in available:
        raise ConfigError(f"{index.path} cannot be searched by {kind!r}; it has {', '.join(available)}")
    retrievers: list[Retriever] = []
    try:
        if kind in ("bm25", "hybrid"):
            from reasonrag.retrieval.bm25 import BM25Retriever

            retrievers.append(BM25Retriever(index))
        if kind in ("dense", "hybrid"):
            from reasonrag.retrieval.dense import DenseRetriever

            dense = DenseRetriever(
                index, config.encoder, gpu=config.gpu, device=config.device, trust_remote_code=trust_remote_code
            )
            retrievers.append(dense)
    # Made so that their checksums agree.
    except (ValueError, TypeError, LookupError, EOFError, AttributeError, ImportError) as error:
        problem = f"{index.path}: files of {kind} are not what they say ({type(error).__name__})"
        raise DataError(f"{problem}; build the index again") from error
    return HybridRetriever(retrievers) if len(retrievers) > 1 else retrievers[0]


def kinds(index: IndexFolder) -> list[str]:
    """Return the kinds of search that an index has the parts for, the best first."""
    parts = index.parts()
    available = [kind for kind, part in (("dense", "embeddings"), ("bm25", "bm25")) if part in parts]
    return ["hybrid", *available] if len(available) > 1 else available


def reciprocal_rank_fusion(rankings: Sequence[Ranking], *, k: int = _K) -> Ranking:
    """Rank the passages of all rankings by their sum of 1 / (k + rank), ranks from 1 (Cormack et al., SIGIR 2009).

    The scores of the rankings are ignored, so they need no common scale. Passages
    with the same id are one passage; if a ranking has it twice, its better rank
    counts. Equal sums keep the order of the first ranking, then of the next.

    >>> both = reciprocal_rank_fusion([(Passage("a", ""), Passage("b", "")), (Passage("b", ""),)], k=1)
    >>> [(passage.id, round(passage.score, 3)) for passage in both]
    [('b', 0.833), ('a', 0.5)]
    """
    passages: dict[str, Passage] = {}
    shares: dict[str, dict[int, float]] = {}  # by passage, then by ranking
    for number, ranking in enumerate(rankings):
        for rank, passage in enumerate(ranking, 1):
            passages.setdefault(passage.id, passage)
            shares.setdefault(passage.id, {}).setdefault(number, 1 / (k + rank))
    # An exact sum: the same ranks in another order of the
    # rankings are a tie, not a difference in the last digit.
    fused = [replace(passage, score=math.fsum(shares[id_].values())) for id_, passage in passages.items()]
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
