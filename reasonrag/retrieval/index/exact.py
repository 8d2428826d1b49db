"""Exact search over embeddings where they lie: every vector is compared, nothing is copied or trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reasonrag.retrieval.index.embeddings import Embeddings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Rows = NDArray[np.int64]

_BLOCK_ROWS = 8192
_QUERIES = 256  # compared at once: 8 MB of scores
# A product of matrices rounds the same pair of vectors differently in another batch or place, by less than this.
_ROUNDING = 1e-5


class ExactSearch:
    """Every query against every passage. Equal scores stand in the order of the rows, alone and in a batch."""

    def __init__(self, embeddings: Embeddings) -> None:
        """Search in these."""
        self._embeddings = embeddings
        self.rows, self.dims = embeddings.rows, embeddings.dims

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """`[n, top_k]` cosines and rows, best first; row -1 where there are fewer."""
        import numpy as np

        queries = np.ascontiguousarray(queries, np.float32)
        parts = [self._some(queries[start : start + _QUERIES], top_k) for start in range(0, len(queries), _QUERIES)]
        if not parts:
            return np.empty((0, top_k), np.float32), np.empty((0, top_k), np.int64)
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])

    def _some(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        import numpy as np

        empty = np.empty(0, np.float32), np.empty(0, np.int64)
        best = [empty for _ in queries]
        bound = np.full((len(queries), 1), -np.inf, np.float32)  # what a score must reach to be among the best
        for first, block in self._blocks():
            scores = queries @ block.T
            for number in np.flatnonzero((scores >= bound).any(axis=1)):
                found, rows = best[number]
                hits = _leaders(scores[number], bound[number, 0], top_k)
                found = np.concatenate([found, scores[number, hits]])
                rows = np.concatenate([rows, hits + first])
                keep = _leaders(found, bound[number, 0], top_k)
                best[number] = found[keep], rows[keep]
                if len(keep) >= top_k:
                    bound[number] = np.partition(found[keep], -top_k)[-top_k] - _ROUNDING
        return rescored(self._embeddings, queries, [rows for _, rows in best], top_k)

    def _blocks(self) -> Any:
        for first, shard in self._embeddings.blocks():
            for start in range(0, len(shard), _BLOCK_ROWS):
                yield first + start, shard[start : start + _BLOCK_ROWS]


def rescored(embeddings: Embeddings, queries: Vectors, candidates: list[Rows], top_k: int) -> tuple[Vectors, Rows]:
    """The best of each query's candidate rows, by a score that depends on nothing but the two vectors.

    Args:
        embeddings: where the rows are.
        queries: `[n, dims]`.
        candidates: `[n]` arrays of rows; -1 is left out.
        top_k: how many to keep.

    Returns:
        `[n, top_k]` cosines and rows, best first, equal ones in the order of the rows; row -1 where there are fewer.
    """
    import numpy as np

    scores = np.full((len(queries), top_k), -np.inf, np.float32)
    places = np.full((len(queries), top_k), -1, np.int64)
    for number, (query, rows) in enumerate(zip(queries, candidates, strict=True)):
        rows = np.sort(rows[rows >= 0])
        # Summed row by row in double precision: a product of matrices would round by the shape of the batch.
        found = (embeddings.take(rows).astype(np.float64) * query).sum(axis=1).astype(np.float32)
        order = np.argsort(-found, kind="stable")[:top_k]
        scores[number, : len(order)], places[number, : len(order)] = found[order], rows[order]
    return scores, places


def _leaders(scores: Vectors, bound: float, top_k: int) -> NDArray[np.int64]:
    """Places of the `top_k` best scores that reach a bound, and of all that rounding might put among them."""
    import numpy as np

    hits = np.flatnonzero(scores >= bound)
    if len(hits) > top_k:
        least = np.partition(scores[hits], -top_k)[-top_k] - _ROUNDING
        hits = hits[scores[hits] >= least]
    return hits
