"""Embeddings to a FAISS index: in pieces that survive a kill, the same bytes whatever was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reasonrag.retrieval.index.embeddings import Embeddings
from reasonrag.retrieval.index.faiss_files import INDEX, LISTS, load_faiss, read_index, write_index
from reasonrag.retrieval.index.folder import Draft
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.retrieval.index.vector_settings import VectorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ADD_ROWS = 8192  # vectors between two signs of life
_TRAINED = "trained.faiss"
_ALIKE = (1, 15, 1)  # from this version on, several threads build the same graph as one
_GROWTH = 1.5  # a graph is saved whenever it has grown by half, so at most a third of the work is lost


def build_inverted_file(
    draft: Draft, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress
) -> None:
    """Learn clusters and codes, add block by block, then put the blocks' lists together on disk.

    FAISS seeds k-means itself, always alike.
    """
    import numpy as np

    faiss = load_faiss()
    if not draft.holds(_TRAINED, scratch=True):
        progress.start(f"learning {settings.clusters} clusters", total=None, unit="clusters")
        sample = np.linspace(0, embeddings.rows, settings.training_rows, endpoint=False).astype(np.int64)
        index = _empty_inverted_file(faiss, embeddings.dims, settings)
        index.train(embeddings.take(sample))
        with draft.writing(_TRAINED, scratch=True) as file:
            write_index(index, file)
    starts = range(0, embeddings.rows, settings.block_rows)
    done = [start for start in starts if draft.holds(_block(start), scratch=True)]
    behind = sum(min(settings.block_rows, embeddings.rows - start) for start in done)
    progress.start("adding vectors", total=embeddings.rows, unit="vectors", done=behind)
    for start in starts:
        if start not in done:
            stop = min(start + settings.block_rows, embeddings.rows)
            _write_block(draft, embeddings, range(start, stop), progress)
    if not draft.holds(INDEX):
        _merge(faiss, draft, [draft.scratch / _block(start) for start in starts], embeddings.rows)


def build_graph(draft: Draft, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress) -> None:
    """Link every vector to its neighbours, shard by shard; what was linked is saved now and then."""
    faiss = load_faiss()
    if draft.holds(INDEX):
        return
    if tuple(int(part) for part in faiss.__version__.split(".")[:3]) < _ALIKE:
        faiss.omp_set_num_threads(1)
    index = _graph_so_far(faiss, draft, embeddings.dims, settings)
    progress.start("linking vectors", total=embeddings.rows, unit="vectors", done=index.ntotal)
    saved = max(index.ntotal, 8 * settings.block_rows)
    while index.ntotal < embeddings.rows:
        block = embeddings.block(index.ntotal, min(index.ntotal + settings.block_rows, embeddings.rows))
        index.add(block)
        progress.advance(len(block))
        if _GROWTH * saved <= index.ntotal < embeddings.rows:
            with draft.writing(_graph(index.ntotal), scratch=True) as file:
                write_index(index, file)
            (draft.scratch / _graph(saved)).unlink(missing_ok=True)
            saved = index.ntotal
    with draft.writing(INDEX) as file:
        write_index(index, file)


def _empty_inverted_file(faiss: Any, dims: int, settings: VectorSettings) -> Any:
    quantizer, metric = faiss.IndexFlatIP(dims), faiss.METRIC_INNER_PRODUCT
    if settings.kind == "ivf-sq8":
        codes = faiss.ScalarQuantizer.QT_8bit
        index = faiss.IndexIVFScalarQuantizer(quantizer, dims, settings.clusters, codes, metric)
    else:
        index = faiss.IndexIVFPQ(quantizer, dims, settings.clusters, settings.code_bytes, 8, metric)
        index.pq.cp.min_points_per_centroid = 1
    index.cp.min_points_per_centroid = 1  # `choose` sees to it that there are enough; FAISS would write warnings
    return index


def _write_block(draft: Draft, embeddings: Embeddings, rows: range, progress: BuildProgress) -> None:
    import numpy as np

    index = load_faiss().read_index(str(draft.scratch / _TRAINED))  # in memory: a mapped one cannot be added to
    for start in range(rows.start, rows.stop, _ADD_ROWS):
        stop = min(start + _ADD_ROWS, rows.stop)
        index.add_with_ids(embeddings.block(start, stop), np.arange(start, stop))
        progress.advance(stop - start)
    with draft.writing(_block(rows.start), scratch=True) as file:
        write_index(index, file)


def _merge(faiss: Any, draft: Draft, blocks: list[Path], rows: int) -> None:
    """The lists of all blocks in one file, as `faiss.contrib.ondisk` does it, but atomic and silent."""
    parts = [read_index(path) for path in blocks]
    index = faiss.read_index(str(draft.scratch / _TRAINED))
    # A name without a folder: where the lists lie now is found when they are read.
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, LISTS)
    places, offset = faiss.OnDiskOneListVector(), 0
    with draft.writing(LISTS) as file:
        for number in range(index.nlist):
            place = faiss.OnDiskOneList()
            place.size = place.capacity = sum(part.invlists.list_size(number) for part in parts)
            place.offset, offset = offset, offset + _write_list(faiss, parts, number, file)
            places.push_back(place)
    lists.lists, lists.totsize = places, offset
    index.replace_invlists(lists, True)
    lists.this.disown()  # the index frees it
    index.ntotal = rows
    with draft.writing(INDEX) as file:
        write_index(index, file)


def _write_list(faiss: Any, parts: list[Any], number: int, file: IO[bytes]) -> int:
    """One list of all parts, codes first, then rows; the bytes it takes."""
    spans: list[NDArray[np.generic]] = []
    sizes = [part.invlists.list_size(number) for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        if size:
            spans.append(faiss.rev_swig_ptr(part.invlists.get_codes(number), size * part.code_size))
    for part, size in zip(parts, sizes, strict=True):
        if size:
            spans.append(faiss.rev_swig_ptr(part.invlists.get_ids(number), size))
    return sum(file.write(span.tobytes()) for span in spans)


def _graph_so_far(faiss: Any, draft: Draft, dims: int, settings: VectorSettings) -> Any:
    saved = sorted(draft.scratch.glob(_graph(None)))
    if not saved:
        index = faiss.IndexHNSWFlat(dims, settings.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = settings.ef_construction
        return index
    index = faiss.read_index(str(saved[-1]))  # in memory: it goes on growing
    for _ in range(index.ntotal):  # the generator of levels is not saved with the graph
        index.hnsw.random_level()
    return index


def _graph(rows: int | None) -> str:
    return "graph-*.faiss" if rows is None else f"graph-{rows:012d}.faiss"


def _block(start: int) -> str:
    return f"block-{start:012d}.faiss"
