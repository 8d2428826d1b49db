"""Several retrievers at once, their rankings fused by rank: words find what vectors miss, and the other way round."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace

from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Passage]], *, k: int = 60) -> tuple[Passage, ...]:
    """Every passage of any ranking, by its sum of 1 / (k + rank), ranks from 1 (Cormack et al., SIGIR 2009).

    The scores of the rankings play no part, so they need no common scale. Passages of one id are one passage; of one
    that a ranking has twice the better rank counts. Equal sums stand in the order of the first ranking, then the next.

    Args:
        rankings: `[retrievers]` rankings of any length, best first.
        k: 1 or more; the larger, the less the first ranks outweigh the later ones.

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
        """Take open retrievers; they are closed with this one.

        Args:
            retrievers: one or more. The ids of passages mean the same to all of them.
            depth: how many passages of each are fused; more where more are asked for.
            k: see `reciprocal_rank_fusion`.
        """
        if not retrievers:
            raise ValueError("a hybrid of no retrievers finds nothing; give one or more")
        self._retrievers = tuple(retrievers)
        self._depth = depth
        self._k = k

    @property
    def fingerprint(self) -> str:
        """16 hex digits over those of the retrievers and how they are fused."""
        known = [[retriever.fingerprint for retriever in self._retrievers], self._depth, self._k]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings of at most `top_k` passages, best first.

        Raises:
            RetrievalError: one of the retrievers failed; what the others found is no ranking of this one.
        """
        depth = max(self._depth, top_k)
        found = await asyncio.gather(*(retriever.search(queries, depth) for retriever in self._retrievers))
        return [reciprocal_rank_fusion(rankings, k=self._k)[: max(top_k, 0)] for rankings in zip(*found, strict=True)]

    async def aclose(self) -> None:
        """Close all retrievers."""
        await asyncio.gather(*(retriever.aclose() for retriever in self._retrievers))
