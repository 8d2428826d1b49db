"""FAISS's search behind the same face as exact search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reasonrag.retrieval.index.embeddings import Embeddings
from reasonrag.retrieval.index.exact import rescored
from reasonrag.retrieval.index.faiss_files import load_faiss, on_gpus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]
    Rows = NDArray[np.int64]

_MOST_CANDIDATES = 2048


class FaissSearch:
    """FAISS's search, its results in an order that does not depend on what else is searched for."""

    def __init__(self, index: Any, *, embeddings: Embeddings | None = None, refine: int = 1) -> None:
        """Search in an open index.

        Args:
            index: of FAISS.
            embeddings: what it was built over.
            refine: candidates per result that are compared exactly, with the embeddings.
        """
        self._faiss = load_faiss()
        self._index = index
        self._embeddings = embeddings
        self._refine = refine if embeddings is not None else 1
        self._part = self._tunable(index)
        self.rows, self.dims = int(index.ntotal), int(index.d)

    @property
    def efforts(self) -> int:
        """The most clusters or candidates that a search can look at; 0 where it looks at everything."""
        if self._part is None:
            return 0
        return int(self._part.nlist) if hasattr(self._part, "nprobe") else _MOST_CANDIDATES

    @property
    def unit(self) -> str:
        """What the effort counts."""
        return "clusters" if hasattr(self._part, "nprobe") else "candidates"

    @property
    def effort(self) -> int:
        """Clusters (nprobe) or candidates (efSearch) that each search looks at."""
        if self._part is None:
            return 0
        return int(self._part.nprobe if hasattr(self._part, "nprobe") else self._part.hnsw.efSearch)

    @effort.setter
    def effort(self, value: int) -> None:
        if self._part is not None and hasattr(self._part, "nprobe"):
            self._part.nprobe = value
        elif self._part is not None:
            self._part.hnsw.efSearch = value

    @property
    def exact(self) -> bool:
        """Whether the index holds the vectors themselves, and compares with each of them."""
        return bool(isinstance(self._index, self._faiss.IndexFlat))

    @property
    def by_inner_product(self) -> bool:
        """Whether more is closer."""
        return bool(self._index.metric_type == self._faiss.METRIC_INNER_PRODUCT)

    def to_gpus(self) -> None:
        """Search on all GPUs from now on, as hard as before."""
        self._index = on_gpus(self._index)
        self._part = None

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """`[n, top_k]` cosines and rows, best first, equal ones in the order of the rows; row -1 where fewer."""
        import numpy as np

        if not len(queries):
            return np.empty((0, top_k), np.float32), np.empty((0, top_k), np.int64)
        count = min(top_k * self._refine, self.rows)
        scores, rows = self._index.search(np.ascontiguousarray(queries, np.float32), count)
        if self._embeddings is not None and self._refine > 1:
            return rescored(self._embeddings, queries, list(rows), top_k)
        order = np.lexsort((rows, -scores), axis=1)
        scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        missing = ((0, 0), (0, top_k - count))
        return (
            np.pad(np.where(rows >= 0, scores, -np.inf), missing, constant_values=-np.inf).astype(np.float32),
            np.pad(rows, missing, constant_values=-1),
        )

    def vector(self, row: int) -> Vectors:
        """`[dims]` of a row, as the index has it."""
        if hasattr(self._part, "make_direct_map"):
            self._part.make_direct_map()
        found: Vectors = self._index.reconstruct(row)
        return found

    def _tunable(self, index: Any) -> Any:
        """The part of an index whose effort can be set."""
        inverted = self._faiss.try_extract_index_ivf(index)
        return inverted if inverted is not None else index if hasattr(index, "hnsw") else None
