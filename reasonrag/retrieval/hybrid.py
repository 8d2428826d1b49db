"""Fuse the rankings of several retrievers by rank: words find what vectors miss, and vice versa."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever
from reasonrag.storage.files import short_hash


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Passage]], *, k: int = 60) -> tuple[Passage, ...]:
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
    found: dict[str, Passage] = {}
    shares: dict[str, list[float]] = {}
    for ranking in rankings:
        ranks: dict[str, int] = {}
        for rank, passage in enumerate(ranking, 1):
            found.setdefault(passage.id, passage)
            ranks.setdefault(passage.id, rank)
        for id_, rank in ranks.items():
            shares.setdefault(id_, []).append(1 / (k + rank))
    # An exact sum: the same ranks in another order of the rankings are a tie, not a difference in the last digit.
    fused = [replace(passage, score=math.fsum(shares[id_])) for id_, passage in found.items()]
    return tuple(sorted(fused, key=lambda passage: -passage.score))


class HybridRetriever:
    """Asks several retrievers over one corpus at the same time and fuses what they find."""

    def __init__(self, retrievers: Sequence[Retriever], *, depth: int = 100, k: int = 60) -> None:
        """Wrap open retrievers over passages with the same ids; they are closed with this one.

        Of each, `depth` passages are fused, or `top_k` of a search if that is more.
        """
        if not retrievers:
            raise ValueError("a hybrid of no retrievers finds nothing; give one or more")
        self._retrievers = tuple(retrievers)
        self._depth = depth
        self._k = k
        self.fingerprint = short_hash([[retriever.fingerprint for retriever in retrievers], depth, k])

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first.

        Raises:
            RetrievalError: one of the retrievers failed; the rankings of the others are then discarded.
        """
        depth = max(self._depth, top_k)
        found = await asyncio.gather(*(retriever.search(queries, depth) for retriever in self._retrievers))
        return [reciprocal_rank_fusion(rankings, k=self._k)[: max(top_k, 0)] for rankings in zip(*found, strict=True)]

    async def aclose(self) -> None:
        await asyncio.gather(*(retriever.aclose() for retriever in self._retrievers))
