"""Search the vectors of an index: exactly over its embeddings, or through a FAISS index that stays on disk."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.secrets import excerpt
from reasonrag.retrieval.index.embeddings import Embeddings, Vectors

Rows = NDArray[np.int64]

INDEX, LISTS = "index.faiss", "lists.ivfdata"

# First bytes of indexes that hold no inverted lists: flat, scalar quantiser, HNSW.
_CODES = (b"IxFI", b"IxF2", b"IxFl", b"IxSQ", b"IHNf", b"IHNs")
_BLOCK_ROWS = 8192
_QUERIES = 256  # compared at once: 8 MB of scores
# A product of matrices rounds the same pair of vectors differently in another batch or place, by less than this.
_ROUNDING = 1e-5
_MOST_CANDIDATES = 2048


class ExactSearch:
    """Compares every query with every passage. Equal scores keep the order of the rows, alone and in a batch.

    Like `FaissSearch`, it is called from one thread at a time.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self.rows, self.dims = embeddings.rows, embeddings.dims

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """Return `[n, top_k]` cosines and rows, best first; the row is -1 where there are fewer."""
        queries = np.ascontiguousarray(queries, np.float32)
        scores, rows = np.empty((len(queries), top_k), np.float32), np.empty((len(queries), top_k), np.int64)
        for start in range(0, len(queries), _QUERIES):
            part = slice(start, start + _QUERIES)
            scores[part], rows[part] = self._search_some(queries[part], top_k)
        return scores, rows

    def _search_some(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        empty = np.empty(0, np.float32), np.empty(0, np.int64)
        best = [empty for _ in queries]
        bound = np.full((len(queries), 1), -np.inf, np.float32)  # what a score must reach to be among the best
        for first, block in self._blocks():
            scores = queries @ block.T
            for number in np.flatnonzero((scores >= bound).any(axis=1)):
                best_scores, best_rows = best[number]
                hits = _leaders(scores[number], bound[number, 0], top_k)
                best_scores = np.concatenate([best_scores, scores[number, hits]])
                best_rows = np.concatenate([best_rows, hits + first])
                keep = _leaders(best_scores, bound[number, 0], top_k)
                best[number] = best_scores[keep], best_rows[keep]
                if len(keep) >= top_k:
                    bound[number] = np.partition(best_scores[keep], -top_k)[-top_k] - _ROUNDING
        return rescored(self._embeddings, queries, [rows for _, rows in best], top_k)

    def _blocks(self) -> Iterator[tuple[int, Vectors]]:
        for first, shard in self._embeddings.blocks():
            for start in range(0, len(shard), _BLOCK_ROWS):
                yield first + start, shard[start : start + _BLOCK_ROWS]


class FaissSearch:
    """Searches a FAISS index. The order of its results does not depend on the other queries of the batch."""

    def __init__(self, index: Any, *, embeddings: Embeddings | None = None, refine: int = 1) -> None:
        """Wrap an open FAISS index.

        If the `embeddings` that it was built over are kept, `refine` candidates per result are compared once more,
        exactly, with them.
        """
        faiss = load_faiss()
        self._index = index
        self._embeddings = embeddings
        self._refine = refine if embeddings is not None else 1
        self.rows, self.dims = int(index.ntotal), int(index.d)
        self.exact = isinstance(index, faiss.IndexFlat)  # it compares a query with each vector, none of them rounded
        self.by_inner_product = bool(index.metric_type == faiss.METRIC_INNER_PRODUCT)
        # What sets how much a search looks at, and the most that this can be; 0 if it always looks at everything.
        self._tunable, self._setting, self.unit, self.efforts = faiss.try_extract_index_ivf(index), "", "candidates", 0
        if self._tunable is not None:
            self._setting, self.unit, self.efforts = "nprobe", "clusters", int(self._tunable.nlist)
        elif hasattr(index, "hnsw"):
            self._tunable, self._setting, self.efforts = index.hnsw, "efSearch", _MOST_CANDIDATES

    @property
    def effort(self) -> int:
        """Clusters (nprobe) or candidates (efSearch) that each search looks at."""
        return int(getattr(self._tunable, self._setting)) if self.efforts else 0

    @effort.setter
    def effort(self, value: int) -> None:
        if self.efforts:
            setattr(self._tunable, self._setting, value)

    def to_gpus(self) -> None:
        """Search on all GPUs from now on, with the effort that is set."""
        self._index, self._tunable, self.efforts = on_gpus(self._index), None, 0

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """Return `[n, top_k]` cosines and rows, best first, equal ones by row; the row is -1 where there are fewer."""
        if not len(queries):
            return np.empty((0, top_k), np.float32), np.empty((0, top_k), np.int64)
        count = min(top_k * self._refine, self.rows)
        scores, rows = self._index.search(np.ascontiguousarray(queries, np.float32), count)
        if self._embeddings is not None and self._refine > 1:
            return rescored(self._embeddings, queries, list(rows), top_k)
        order = np.lexsort((rows, -scores), axis=1)
        scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        scores = np.where(rows >= 0, scores, -np.inf)
        missing = ((0, 0), (0, top_k - count))
        padded_scores = np.pad(scores, missing, constant_values=-np.inf).astype(np.float32)
        return padded_scores, np.pad(rows, missing, constant_values=-1)

    def vector(self, row: int) -> Vectors:
        """Return the `[dims]` vector of a row as the index stores it, rounded or not."""
        if hasattr(self._tunable, "make_direct_map"):
            self._tunable.make_direct_map()
        reconstructed: Vectors = self._index.reconstruct(row)
        return reconstructed


VectorSearch = ExactSearch | FaissSearch


def rescored(embeddings: Embeddings, queries: Vectors, candidates: list[Rows], top_k: int) -> tuple[Vectors, Rows]:
    """Return the best of each query's candidates, by a score that depends on nothing but the two vectors.

    From `[n, dims]` queries and `[n]` arrays of rows, of which -1 is ignored: `[n, top_k]` cosines and rows, best
    first, equal ones by row; the row is -1 where there are fewer.
    """
    best_scores = np.full((len(queries), top_k), -np.inf, np.float32)
    best_rows = np.full((len(queries), top_k), -1, np.int64)
    for number, (query, rows) in enumerate(zip(queries, candidates, strict=True)):
        rows = np.sort(rows[rows >= 0])
        # Summed row by row in double precision: a product of matrices would round by the shape of the batch.
        scores = (embeddings.take(rows).astype(np.float64) * query).sum(axis=1).astype(np.float32)
        order = np.argsort(-scores, kind="stable")[:top_k]
        best_scores[number, : len(order)] = scores[order]
        best_rows[number, : len(order)] = rows[order]
    return best_scores, best_rows


def _leaders(scores: Vectors, bound: float, top_k: int) -> Rows:
    """Return where the `top_k` best scores at or above `bound` are, and all that rounding might put among them."""
    hits = np.flatnonzero(scores >= bound)
    if len(hits) > top_k:
        least = np.partition(scores[hits], -top_k)[-top_k] - _ROUNDING
        hits = hits[scores[hits] >= least]
    return hits


def load_faiss() -> Any:
    """Import faiss; raise ConfigError if it is not installed."""
    if find_spec("faiss") is None:
        raise ConfigError("dense search needs faiss, which is not installed; pip install 'reasonrag[dense]'")
    return import_module("faiss")


def write_index(index: Any, file: IO[bytes]) -> None:
    """Write a FAISS index to an open file."""
    faiss = load_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def read_index(path: Path) -> Any:
    """Open a FAISS index so that its vectors and lists stay on disk until a search reads them.

    Raises:
        DataError: the file is not a FAISS index.
    """
    faiss = load_faiss()
    try:
        if (path.parent / LISTS).exists():
            return _with_lists(faiss, path)
        with path.open("rb") as file:
            kind = file.read(4)
        # Each flag maps one sort of index and reads all others into memory.
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if kind in _CODES else faiss.IO_FLAG_MMAP)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} cannot be read as a FAISS index", quoting=error) from error


def on_gpus(index: Any) -> Any:
    """Copy a FAISS index to all GPUs, a share each. Search it from one thread only: GPU resources are not locked.

    Raises:
        ConfigError: this faiss has no GPU support, there is no GPU, or GPUs cannot search this kind of index.
    """
    faiss = load_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        raise ConfigError("the installed faiss has no GPU support; pip install 'reasonrag[gpu]', or leave out gpu")
    if faiss.get_num_gpus() == 0:
        raise ConfigError("no GPU is visible to faiss; leave out gpu")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise ConfigError(
            f"vectors of kind {type(index).__name__} cannot be on GPUs ({excerpt(str(error))}); build flat or "
            "ivf ones, or leave out gpu"
        ) from error


def _with_lists(faiss: Any, path: Path) -> Any:
    """Open an inverted file whose lists are in a second file.

    IO_FLAG_ONDISK_SAME_DIR would do the same, but prints a line to standard output. IO_FLAG_MMAP leaves such lists
    unmapped, and the first search then crashes the process.
    """
    index = faiss.read_index(str(path), faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY)
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.filename = str(path.parent / LISTS)
    lists.do_mmap()
    return index
