"""FAISS over an index's embeddings: choose a kind, build it, tune it against exact search, open it; or adopt a file."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import random
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import excerpt
from reasonrag.retrieval.encoders import TextEncoder, identity_checksum
from reasonrag.retrieval.index.embeddings import Embeddings, Vectors, remember_location
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.storage.files import place

Rows = NDArray[np.int64]
VectorKind = Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]
VECTOR_KINDS: tuple[VectorKind, ...] = get_args(VectorKind)  # in the order in which `auto` tries them

INDEX, LISTS = "index.faiss", "lists.ivfdata"
TOP_K = 10
SAMPLE = 256  # queries that a search is tuned with

_FLAT_BYTES = 128 << 20  # one core compares a query with them in some 20 ms
_BLOCK_BYTES = 64 << 20  # of codes that are in memory at once while an inverted file is built
_TRAINING, _LEAST_TRAINING = 64, 39  # vectors per cluster; FAISS asks for 39 to 256
_PQ_LEAST_ROWS = 256 * _LEAST_TRAINING
_LINKS = 32  # of a vector in the graph; the lowest layer has twice as many
_ROWS = 8192  # vectors between two progress updates
_QUERY_WORDS = 8
_TIE = 1e-6
# A product of matrices rounds the same pair of vectors differently in another batch or place, by less than this.
_ROUNDING = 1e-5
_MOST_CANDIDATES = 2048
_TRAINED = "trained.faiss"
# First bytes of indexes that hold no inverted lists: flat, scalar quantizer, HNSW.
_CODES = (b"IxFI", b"IxF2", b"IxFl", b"IxSQ", b"IHNf", b"IHNs")
# Of an adopted index: passages that are compared, and the least cosine with exact and with rounded vectors.
_CHECKED, _LEAST_FLAT, _LEAST_ROUNDED = 32, 0.99, 0.9
_END = 1 << 20


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """How vectors are indexed and searched; 0 or "" if a kind does not use the value.

    The kind flat compares with every vector; hnsw follows a graph of neighbours; ivf-sq8 and ivf-pq look into the
    nearest clusters, at vectors rounded to one byte per dimension, or for ivf-pq per 8 dimensions.
    """

    kind: VectorKind
    factory: str = ""  # of faiss.index_factory
    training_rows: int = 0  # vectors that clusters and codes are learned from, spread evenly over all
    block_rows: int = _ROWS  # vectors added at once: the unit of resume of an inverted file
    refine: int = 1  # candidates per result that are compared once more, exactly, with the embeddings; 1 skips this
    recall: float = 0.95  # target recall@10 against exact search that the effort of a search is tuned for, in (0, 1]


def choose(
    rows: int, dims: int, max_bytes: int, *, kind: VectorKind | Literal["auto"] = "auto", recall: float = 0.95
) -> VectorSettings:
    """Choose settings: of the given kind; or flat for few vectors, else the first that fits into `max_bytes`.

    >>> [choose(rows, 384, 8 << 30).kind for rows in (10_000, 1_000_000, 10_000_000, 50_000_000)]
    ['flat', 'hnsw', 'ivf-sq8', 'ivf-pq']
    """
    vectors = rows * dims * 4
    # Bytes of building or searching, whichever is more. Lists of a graph grow by doubling while vectors are added.
    needed = {"hnsw": 2 * (vectors + rows * (9 * _LINKS + 24)), "ivf-sq8": rows * (dims + 8), "ivf-pq": 0}
    if kind == "auto":
        fitting = [name for name in VECTOR_KINDS[1:] if needed[name] <= max_bytes]
        kind = "flat" if vectors <= _FLAT_BYTES else fitting[0]
    elif needed.get(kind, 0) > max_bytes:
        raise ConfigError(
            f"{kind} over {rows} passages of {dims} dimensions needs {needed[kind] / (1 << 20):,.0f} MiB, more than "
            f"the {max_bytes / (1 << 20):,.0f} MiB of --max-memory; allow more, or take ivf-pq"
        )
    if kind == "flat":
        return VectorSettings(kind, recall=recall)
    if kind == "hnsw":
        return VectorSettings(kind, f"HNSW{_LINKS}", recall=recall)
    if kind == "ivf-pq" and rows < _PQ_LEAST_ROWS:
        raise ConfigError(f"ivf-pq learns its codes from {_PQ_LEAST_ROWS} passages or more, not {rows}; take flat")
    # The largest power of two up to 4 * sqrt(rows) that leaves FAISS enough vectors per cluster, and at least 1.
    clusters = 1 << max(min(4 * math.isqrt(rows), rows // _LEAST_TRAINING), 1).bit_length() - 1
    most = max_bytes // 4 // (dims * 4)
    while clusters > 1 and clusters * _LEAST_TRAINING > most:
        clusters //= 2
    training, code_bytes, codes, refine = min(rows, clusters * _TRAINING, most), dims, "SQ8", 2
    if kind == "ivf-pq":
        code_bytes = next(parts for parts in range(max(dims // 8, 1), 0, -1) if dims % parts == 0)
        training, codes, refine = min(rows, max(training, _PQ_LEAST_ROWS)), f"PQ{code_bytes}x8", 10
    block_rows = max(_BLOCK_BYTES // (code_bytes + 8) // _ROWS, 1) * _ROWS
    return VectorSettings(kind, f"IVF{clusters},{codes}", training, block_rows, refine, recall)


class ExactSearch:
    """Compares every query with every passage. Equal scores keep the order of the rows, alone and in a batch.

    Like `FaissSearch`, it is called from one thread at a time.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self.rows, self.dims = embeddings.rows, embeddings.dims

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """Return `[n, top_k]` cosines and rows, best first, filled up with row -1 if the index holds fewer."""
        queries = np.ascontiguousarray(queries, np.float32)
        best_scores, best_rows = [np.empty(0, np.float32) for _ in queries], [np.empty(0, np.int64) for _ in queries]
        bounds = np.full((len(queries), 1), -np.inf, np.float32)  # the score of the last of the best
        for first, block in self._embeddings.blocks():
            scores = queries @ block.T
            for number in np.flatnonzero((scores >= bounds).any(axis=1)):
                hits = np.flatnonzero(scores[number] >= bounds[number])
                candidates = np.concatenate([best_scores[number], scores[number, hits]])
                rows = np.concatenate([best_rows[number], hits + first])
                if len(candidates) > top_k:
                    # All that rounding might put among the best stay, however many are equal.
                    bounds[number] = np.partition(candidates, -top_k)[-top_k] - _ROUNDING
                    keep = candidates >= bounds[number]
                    candidates, rows = candidates[keep], rows[keep]
                best_scores[number], best_rows[number] = candidates, rows
        return rescored(self._embeddings, queries, best_rows, top_k)


class FaissSearch:
    """Searches a FAISS index. The order of its results does not depend on the other queries of the batch."""

    def __init__(self, index: Any, *, embeddings: Embeddings | None = None, refine: int = 1) -> None:
        """Wrap an open FAISS index.

        If the `embeddings` that it was built over are kept, `refine` candidates per result are compared once more,
        exactly, with them.
        """
        faiss = load_faiss()
        self._index = index
        self._embeddings = embeddings if refine > 1 else None
        self._refine = refine if embeddings is not None else 1
        self.rows, self.dims = int(index.ntotal), int(index.d)
        # What sets how much a search looks at, and the most that this can be; 0 if it always looks at everything.
        self._tunable, self._setting, self.efforts = faiss.try_extract_index_ivf(index), "", 0
        if self._tunable is not None:
            self._setting, self.efforts = "nprobe", int(self._tunable.nlist)
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
        """Return `[n, top_k]` cosines and rows, best first, equal scores by row, filled up with row -1."""
        if not len(queries):
            return np.empty((0, top_k), np.float32), np.empty((0, top_k), np.int64)
        count = min(top_k * self._refine, self.rows)
        scores, rows = self._index.search(np.ascontiguousarray(queries, np.float32), count)
        if self._embeddings is not None:
            return rescored(self._embeddings, queries, list(rows), top_k)
        order = np.lexsort((rows, -scores), axis=1)
        scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        scores = np.where(rows >= 0, scores, -np.inf)
        missing = ((0, 0), (0, top_k - count))
        padded_scores = np.pad(scores, missing, constant_values=-np.inf).astype(np.float32)
        return padded_scores, np.pad(rows, missing, constant_values=-1)


VectorSearch = ExactSearch | FaissSearch


def rescored(embeddings: Embeddings, queries: Vectors, candidates: list[Rows], top_k: int) -> tuple[Vectors, Rows]:
    """Return the best of each query's candidates, by a score that depends on nothing but the two vectors.

    From `[n, dims]` queries and `[n]` arrays of rows, of which -1 is ignored: `[n, top_k]` cosines and rows, best
    first, equal scores by row, filled up with row -1.
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


def build_vectors(
    index: IndexFolder, settings: VectorSettings, *, queries: Vectors, progress: BuildProgress
) -> Manifest | None:
    """Build the part `vectors` over the embeddings, or remove it if search is exact.

    The index has the part `embeddings`; the caller holds its lock. A killed build of an inverted file resumes after the
    last block; a graph starts again. The effort of a search is tuned with `[n, dims]` queries.

    Returns:
        The manifest of the part; None if search is exact.
    """
    if settings.kind == "flat":
        index.remove("vectors")
        return None
    faiss, embeddings = load_faiss(), Embeddings(index)
    built_over = index.need("embeddings")
    made_of = {
        "passages": built_over.plan.made_of["passages"],
        "embeddings": built_over.fingerprint,
        "queries": hashlib.sha256(queries.tobytes()).hexdigest(),  # they decide the effort of searches
    }
    decisive = {"encoder": built_over.plan.settings["encoder"], **asdict(settings)}
    plan = Plan("vectors", made_of, decisive, {"faiss": faiss.__version__})
    if manifest := index.sound(plan):
        return manifest
    draft = Draft(index, plan)
    if not draft.holds(INDEX):
        empty = faiss.index_factory(embeddings.dims, settings.factory, faiss.METRIC_INNER_PRODUCT)
        if settings.kind == "hnsw":
            progress.start("linking vectors", total=embeddings.rows, unit="vectors")
            for _, block in embeddings.blocks():
                empty.add(block)
                progress.advance(len(block))
            write_index(draft, INDEX, empty)
        else:
            _build_inverted_file(draft, empty, embeddings, settings, progress)
    search = FaissSearch(read_index(draft.folder / INDEX), embeddings=embeddings, refine=settings.refine)
    counts = {"passages": embeddings.rows, "dims": embeddings.dims}
    return draft.finish(counts | tune(search, ExactSearch(embeddings), queries, settings.recall, progress))


def _build_inverted_file(
    draft: Draft, index: Any, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress
) -> None:
    """Learn clusters and codes, add vectors block by block, then merge the blocks' lists on disk.

    FAISS seeds k-means itself, always with the same seed.
    """
    faiss, ondisk = load_faiss(), import_module("faiss.contrib.ondisk")
    if not draft.holds(_TRAINED, scratch=True):
        progress.start(f"learning {settings.factory}", total=None, unit="clusters")
        sample = np.linspace(0, embeddings.rows, settings.training_rows, endpoint=False).astype(np.int64)
        index.train(embeddings.take(sample))
        write_index(draft, _TRAINED, index, scratch=True)
    blocks = []
    progress.start("adding vectors", total=embeddings.rows, unit="vectors")
    for start in range(0, embeddings.rows, settings.block_rows):
        stop = min(start + settings.block_rows, embeddings.rows)
        blocks.append(f"block-{start:012d}.faiss")
        if not draft.holds(blocks[-1], scratch=True):
            index = faiss.read_index(str(draft.scratch / _TRAINED))  # in memory: a mapped one cannot be added to
            for first in range(start, stop, _ROWS):
                rows = np.arange(first, min(first + _ROWS, stop))
                index.add_with_ids(embeddings.take(rows), rows)
            write_index(draft, blocks[-1], index, scratch=True)
        progress.advance(stop - start)
    index = faiss.read_index(str(draft.scratch / _TRAINED))
    (draft.folder / LISTS).unlink(missing_ok=True)  # of a process that was killed while it merged
    with _stdout_closed():  # the library prints the size of the file
        ondisk.merge_ondisk(index, [str(draft.scratch / block) for block in blocks], str(draft.folder / LISTS))
    # A name without a folder: `read_index` finds the file next to the index, wherever that was moved.
    faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).filename = LISTS
    write_index(draft, INDEX, index)


@contextmanager
def _stdout_closed() -> Iterator[None]:
    """Drop what C code of this process prints."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
        flush(None)  # C buffers its output
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


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
    compared_with = Embeddings(index) if refine > 1 else None
    search = FaissSearch(read_index(index.part("vectors") / INDEX), embeddings=compared_with, refine=refine)
    if "effort" in manifest.counts:
        search.effort = manifest.counts["effort"]
    if gpu:
        search.to_gpus()
    return search


def adopt_vectors(index: IndexFolder, path: Path, encoder: TextEncoder, *, progress: BuildProgress) -> Manifest:
    """Make a FAISS index that was built elsewhere the part `vectors`: a hard link on the same disk, else a copy.

    32 passages are encoded and compared with the vectors in their rows, so that another encoder or another order of the
    passages is noticed. The effort of its searches is tuned against its own widest search, because without
    embeddings an exact search is impossible. The caller holds the lock of `index`, which has the part `passages`. The
    file must not change afterwards, and the encoder is the one that it was built with, including its prefixes.

    Raises:
        DataError: the file cannot be read, or has other passages, dimensions, another distance or encoder.
    """
    passages = index.verify("passages")
    try:
        with path.open("rb") as file:  # the whole file is read only once the part is finished
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_END))
            file.seek(max(size - _END, 0))
            digest.update(file.read())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a FAISS index file") from error
    made_of = {"passages": passages.fingerprint, "encoder": identity_checksum(encoder.identity)}
    settings = {"kind": "adopted", "size": size, "ends": digest.hexdigest(), "encoder": dict(encoder.identity)}
    plan = Plan("vectors", made_of, settings)
    remember_location(index, encoder)
    if manifest := index.sound(plan):
        return manifest
    with closing(PassageStore(index.part("passages"))) as store:
        _check_adopted(path, read_index(path), store, encoder)
        queries = encoder.encode_queries([piece for _, piece in self_queries(store, SAMPLE)])
    draft = Draft(index, plan)
    if not draft.holds(INDEX):
        progress.start("linking or copying the FAISS index", total=None, unit="bytes")
        place(path, draft.folder / INDEX)
    search, widest = FaissSearch(read_index(path)), FaissSearch(read_index(path))
    widest.effort = widest.efforts
    counts = {"passages": search.rows, "dims": search.dims}
    return draft.finish(counts | tune(search, widest, queries, 0.95, progress))


def _check_adopted(path: Path, index: Any, store: PassageStore, encoder: TextEncoder) -> None:
    """Raise if an index has another shape, or random passages do not have the vectors that the encoder gives them."""
    faiss = load_faiss()
    if (index.ntotal, index.d) != (len(store), encoder.dims):
        raise DataError(
            f"{path} holds {index.ntotal} vectors of {index.d} dimensions, and the corpus {len(store)} passages; "
            f"{encoder.name} makes {encoder.dims} dimensions: it was built over another corpus or with another encoder"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise DataError(f"{path} compares by distance, not by inner product; build the vectors again")
    rows = sorted(random.Random(0).sample(range(len(store)), min(_CHECKED, len(store))))
    expected = encoder.encode_passages([store.passage(row).contents for row in rows])
    inverted_file = faiss.try_extract_index_ivf(index)
    try:
        if inverted_file is not None:
            inverted_file.make_direct_map()
        stored = np.stack([index.reconstruct(row) for row in rows])
    except RuntimeError as error:
        raise DataError(
            f"{path} does not give its vectors back ({excerpt(str(error))}), so they cannot be checked; build "
            "them again"
        ) from error
    cosines = (stored * expected).sum(axis=1) / np.maximum(np.linalg.norm(stored, axis=1), 1e-12)
    # The median, because a single passage may have been cut or cleaned differently.
    cosine = float(np.median(cosines))
    least = _LEAST_FLAT if isinstance(index, faiss.IndexFlat) else _LEAST_ROUNDED
    if not cosine > least:
        raise DataError(
            f"{path} is of another encoder or another order of passages: over {len(rows)} passages the median cosine "
            f"of its vectors with those of {encoder.name} is {cosine:.3f}, not above {least}"
        )


def self_queries(store: PassageStore, count: int, *, seed: int = 0) -> list[tuple[int, str]]:
    """Draw queries from an index's own passages: the rows of `count` passages, and at most 8 words in a row of each.

    All passages are taken if there are fewer. The same seed gives the same queries.
    """
    draw = random.Random(seed)
    queries = []
    for row in draw.sample(range(len(store)), min(count, len(store))):
        words = store.passage(row).contents.split()
        start = draw.randrange(max(len(words) - _QUERY_WORDS, 0) + 1)
        queries.append((row, " ".join(words[start : start + _QUERY_WORDS])))
    return queries


def recall_at_10(approximate: tuple[Vectors, Rows], exact: tuple[Vectors, Rows]) -> float:
    """Return the share of exact search's ten best that an approximate search finds too, in [0, 1].

    A vector as close as the exact tenth counts: of passages that occur twice, either may be returned.
    """
    (scores, rows), (exact_scores, exact_rows) = approximate, exact
    if not len(exact_scores):
        return 1.0
    tenth = np.min(np.where(exact_rows >= 0, exact_scores, np.inf), axis=1, keepdims=True)
    hits = ((rows >= 0) & (scores >= tenth - _TIE)).sum()
    return float(min(hits / (exact_rows >= 0).sum(), 1.0))


def tune(
    search: FaissSearch, reference: VectorSearch, queries: Vectors, target: float, progress: BuildProgress
) -> dict[str, int]:
    """Set the least effort that reaches a target recall@10, in (0, 1], for the first 256 of `[n, dims]` queries.

    The results of `reference` count as correct.

    Returns:
        `effort`, and the recall that it reaches, in thousandths; empty if there is nothing to tune.
    """
    if not search.efforts:
        return {}
    queries = queries[:SAMPLE]
    progress.start("tuning the search", total=None, unit="searches")
    expected = reference.search(queries, TOP_K)

    def recall(effort: int) -> float:
        search.effort = effort
        progress.advance()
        return recall_at_10(search.search(queries, TOP_K), expected)

    high = 1
    while recall(high) < target and high < search.efforts:
        high = min(2 * high, search.efforts)
    # Recall is assumed to grow with the effort.
    lowest = high // 2 + 1
    reached = recall(lowest + bisect_left(range(lowest, high), target, key=recall))
    short = "" if reached >= target else f"; {target:.3f} was requested and cannot be reached, take another kind"
    progress.note(
        f"vectors: {search.effort} of {search.efforts} clusters or candidates per search give {reached:.3f} of exact "
        f"search's ten best, over {len(queries)} queries{short}"
    )
    return {"effort": search.effort, "recall_permille": round(1000 * reached)}


def load_faiss() -> Any:
    """Import faiss; raise ConfigError if it is not installed."""
    if find_spec("faiss") is None:
        raise ConfigError("dense search needs faiss, which is not installed; pip install 'reasonrag[dense]'")
    return import_module("faiss")


def write_index(draft: Draft, name: str, index: Any, *, scratch: bool = False) -> None:
    """Write a FAISS index, whole or not at all."""
    with draft.writing(name, scratch=scratch) as file:
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
            # IO_FLAG_ONDISK_SAME_DIR would do the same, but prints a line to standard output. IO_FLAG_MMAP leaves such
            # lists unmapped, and the first search then crashes the process.
            index = faiss.read_index(str(path), faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY)
            lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
            lists.filename = str(path.parent / LISTS)
            lists.do_mmap()
            return index
        with path.open("rb") as file:
            kind = file.read(4)
        # Each flag maps one sort of index and reads all others into memory.
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if kind in _CODES else faiss.IO_FLAG_MMAP)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} cannot be read as a FAISS index", quoting=error) from error


def on_gpus(index: Any) -> Any:
    """Copy a FAISS index to all GPUs, a share each. Search it from one thread only: GPU resources are not locked.

    Raises:
        ConfigError: faiss finds no GPU, or GPUs cannot search this kind of index.
    """
    faiss = load_faiss()
    if faiss.get_num_gpus() == 0:
        raise ConfigError("faiss finds no GPU; pip install 'reasonrag[gpu]' has GPU support, or leave out gpu")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise ConfigError(
            f"vectors of kind {type(index).__name__} cannot be on GPUs; build flat or ivf ones, or leave out gpu",
            quoting=error,
        ) from error
