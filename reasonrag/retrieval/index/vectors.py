"""Build a FAISS index over an index's embeddings, tune it against exact search, and open it.

Building goes in pieces that survive a kill; the bytes are the same whatever was interrupted.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np

from reasonrag.core.errors import DataError
from reasonrag.retrieval.index.embeddings import Embeddings, Vectors
from reasonrag.retrieval.index.faiss_search import (
    INDEX,
    LISTS,
    ExactSearch,
    FaissSearch,
    VectorSearch,
    load_faiss,
    on_gpus,
    read_index,
    write_index,
)
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.vector_settings import SAMPLE, VectorSettings, memory, shown, tune

_ADD_ROWS = 8192  # vectors between two progress updates
_TRAINED = "trained.faiss"
_ALIKE = (1, 15, 1)  # from this version on, several threads build the same graph as one
_GROWTH = 1.5  # a graph is saved whenever it has grown by half, so at most a third of the work is lost


def build_vectors(
    index: IndexFolder,
    settings: VectorSettings,
    *,
    max_bytes: int,
    queries: Vectors | None = None,
    progress: BuildProgress,
) -> Manifest | None:
    """Build the part `vectors` over the embeddings, or remove it if search is exact. A killed build resumes.

    The index has the part `embeddings`; the caller holds its lock. `max_bytes`, the limit that `choose` was given, is
    only shown. The effort of a search is tuned with `[n, dims]` queries; None takes vectors of the passages themselves,
    which makes the task look easier than it is.

    Returns:
        The manifest of the part; None if search is exact.
    """
    embeddings = Embeddings(index)
    progress.note(f"vectors: {settings.kind}; {shown(memory(embeddings.rows, embeddings.dims, max_bytes), max_bytes)}")
    if settings.kind == "flat":
        index.remove("vectors")
        return None
    if queries is None:
        rows = np.linspace(0, embeddings.rows, min(SAMPLE, embeddings.rows), endpoint=False)
        queries = embeddings.take(rows.astype(np.int64))
    built_over = index.need("embeddings")
    made_of = {
        "passages": built_over.plan.made_of["passages"],
        "embeddings": built_over.fingerprint,
        "queries": hashlib.sha256(queries.tobytes()).hexdigest(),  # they decide the effort of searches
    }
    decisive = {"encoder": built_over.plan.settings["encoder"], **asdict(settings)}
    plan = Plan("vectors", made_of, decisive, {"faiss": _faiss_version()})
    if made := index.sound(plan):
        return made
    draft = Draft(index, plan)
    build = build_graph if settings.kind == "hnsw" else build_inverted_file
    build(draft, embeddings, settings, progress)
    search = FaissSearch(read_index(draft.folder / INDEX), embeddings=embeddings, refine=settings.refine)
    counts = {"passages": embeddings.rows, "dims": embeddings.dims}
    return draft.finish(counts | tune(search, ExactSearch(embeddings), queries, settings.recall, progress))


def open_vectors(index: IndexFolder, *, gpu: bool = False) -> VectorSearch:
    """Open the search over an index's vectors: FAISS if the part `vectors` exists, else exact over the embeddings.

    `gpu` copies the vectors to all GPUs and searches there.

    Raises:
        DataError: neither part exists, or a file is missing or damaged.
        ConfigError: faiss is not installed, or cannot search on GPUs.
    """
    if index.manifest("vectors") is None:
        embeddings = Embeddings(index)
        if not gpu:
            return ExactSearch(embeddings)
        flat = load_faiss().IndexFlatIP(embeddings.dims)
        for _, shard in embeddings.blocks():
            flat.add(shard)
        return FaissSearch(on_gpus(flat))
    manifest = index.verify("vectors")
    refine = int(manifest.plan.settings.get("refine", 1))
    candidates_compared_with = Embeddings(index) if refine > 1 else None
    opened = read_index(index.part("vectors") / INDEX)
    search = FaissSearch(opened, embeddings=candidates_compared_with, refine=refine)
    if search.rows != manifest.counts["passages"]:
        raise DataError(f"index {index.path}: vectors/{INDEX} holds {search.rows} vectors, not what its manifest says")
    if search.efforts and "effort" in manifest.counts:
        search.effort = manifest.counts["effort"]
    if gpu:
        search.to_gpus()
    return search


def _faiss_version() -> str:
    for name in ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu-cu11", "faiss-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(load_faiss().__version__)


def build_inverted_file(
    draft: Draft, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress
) -> None:
    """Learn clusters and codes, add vectors block by block, then merge the blocks' lists on disk.

    FAISS seeds k-means itself, always with the same seed.
    """
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
    rows_done = sum(min(settings.block_rows, embeddings.rows - start) for start in done)
    progress.start("adding vectors", total=embeddings.rows, unit="vectors", done=rows_done)
    for start in starts:
        if start not in done:
            stop = min(start + settings.block_rows, embeddings.rows)
            _write_block(draft, embeddings, range(start, stop), progress)
    if not draft.holds(INDEX):
        _merge(faiss, draft, [draft.scratch / _block(start) for start in starts], embeddings.rows)


def build_graph(draft: Draft, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress) -> None:
    """Link every vector to its neighbours, shard by shard; save the graph each time it has grown by half."""
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
    index.cp.min_points_per_centroid = 1  # `choose` made sure that there are enough; FAISS would print warnings
    return index


def _write_block(draft: Draft, embeddings: Embeddings, rows: range, progress: BuildProgress) -> None:
    index = load_faiss().read_index(str(draft.scratch / _TRAINED))  # in memory: a mapped one cannot be added to
    for start in range(rows.start, rows.stop, _ADD_ROWS):
        stop = min(start + _ADD_ROWS, rows.stop)
        index.add_with_ids(embeddings.block(start, stop), np.arange(start, stop))
        progress.advance(stop - start)
    with draft.writing(_block(rows.start), scratch=True) as file:
        write_index(index, file)


def _merge(faiss: Any, draft: Draft, blocks: list[Path], rows: int) -> None:
    """Write the lists of all blocks to one file, as `faiss.contrib.ondisk` does, but atomically and without output."""
    parts = [read_index(path) for path in blocks]
    index = faiss.read_index(str(draft.scratch / _TRAINED))
    # A name without a folder: `read_index` finds the file beside the index, wherever that was moved.
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, LISTS)
    list_locations, offset = faiss.OnDiskOneListVector(), 0
    with draft.writing(LISTS) as file:
        for number in range(index.nlist):
            location = faiss.OnDiskOneList()
            location.size = location.capacity = sum(part.invlists.list_size(number) for part in parts)
            location.offset = offset
            offset += _write_list(faiss, parts, number, file)
            list_locations.push_back(location)
    lists.lists, lists.totsize = list_locations, offset
    index.replace_invlists(lists, True)
    lists.this.disown()  # the index frees it
    index.ntotal = rows
    with draft.writing(INDEX) as file:
        write_index(index, file)


def _write_list(faiss: Any, parts: list[Any], number: int, file: IO[bytes]) -> int:
    """Write one list of all parts, first the codes, then the rows; return its size in bytes."""
    sizes = [part.invlists.list_size(number) for part in parts]
    written = 0
    for part, size in zip(parts, sizes, strict=True):
        if size:
            codes = faiss.rev_swig_ptr(part.invlists.get_codes(number), size * part.code_size)
            written += file.write(codes.tobytes())
    for part, size in zip(parts, sizes, strict=True):
        if size:
            rows = faiss.rev_swig_ptr(part.invlists.get_ids(number), size)
            written += file.write(rows.tobytes())
    return written


def _graph_so_far(faiss: Any, draft: Draft, dims: int, settings: VectorSettings) -> Any:
    saved = sorted(draft.scratch.glob("graph-*.faiss"))
    if not saved:
        index = faiss.IndexHNSWFlat(dims, settings.links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = settings.ef_construction
        return index
    index = faiss.read_index(str(saved[-1]))  # in memory: it will grow
    for _ in range(index.ntotal):  # the generator of levels is not saved with the graph
        index.hnsw.random_level()
    return index


def _graph(rows: int) -> str:
    return f"graph-{rows:012d}.faiss"


def _block(start: int) -> str:
    return f"block-{start:012d}.faiss"
