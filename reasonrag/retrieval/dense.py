"""Dense search: the vectors of all passages, encoded once, in shards; a FAISS index over them; and the retriever."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError, RetrievalError, is_out_of_memory
from reasonrag.core.settings import validate
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import LocalRetriever
from reasonrag.retrieval.encoders import TextEncoder, Vectors, differences, identity_checksum
from reasonrag.retrieval.index import BuildProgress, Draft, EncoderConfig, IndexFolder, Manifest, Plan
from reasonrag.retrieval.passages import PASSAGES, PassageStore
from reasonrag.storage.files import read_json, write_json

Rows = NDArray[np.int64]
TOP_K = 10

_SHARD_ROWS = 8192  # passages in a file; the most work that a kill can cost
_ENCODED_AT_ONCE = 1024  # passages that the encoder sorts by length and encodes between two progress updates
_QUERY_BATCH = 64  # queries that the model reads at once
_LOCATION = ".encoder.json"

_INDEX, _LISTS, _TRAINED = "index.faiss", "lists.ivfdata", "trained.faiss"
_FLAT_BYTES = 128 << 20  # one core compares a query with them in some 20 ms
_BLOCK_BYTES = 64 << 20  # of codes that are in memory at once while an inverted file is built
_TRAINING, _LEAST_TRAINING = 64, 39  # vectors per cluster; FAISS asks for 39 to 256
_PQ_LEAST_ROWS = 256 * _LEAST_TRAINING
_ADDED_AT_ONCE = 8192  # vectors between two progress updates
_TUNED_QUERIES = 256
_TIE = 1e-6
# A product of matrices rounds the same pair of vectors
# differently in another batch or place, by less than this.
_ROUNDING = 1e-5


# --- The part `embeddings` ---


class Embeddings:
    """`[rows, dims]` float32 vectors of length 1 by row of `passages`, memory-mapped."""

    def __init__(self, index: IndexFolder) -> None:
        """Verify and memory-map the part; raise DataError if the index has none, or a file is missing or damaged."""
        folder, manifest = index.part("embeddings"), index.verify("embeddings")
        self.rows, self.dims = manifest.counts["passages"], manifest.counts["dims"]
        self._shard_rows = int(manifest.plan.settings["shard_rows"])
        self._shards: list[Vectors] = []
        for start in range(0, self.rows, self._shard_rows):
            # Slices of np.memmap cost ten times as much as
            # slices of the plain array over the same mapping.
            self._shards.append(np.asarray(np.load(folder / _shard(start // self._shard_rows), mmap_mode="r")))

    def blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Yield the first row and the vectors of every shard, in order."""
        for number, shard in enumerate(self._shards):
            yield number * self._shard_rows, shard

    def take(self, rows: Rows) -> Vectors:
        """Return the `[n, dims]` vectors of any rows, 0 <= row < rows."""
        vectors = np.empty((len(rows), self.dims), np.float32)
        # One read for each shard, whatever the order of the rows.
        shards, rows_in_shard = np.divmod(rows, self._shard_rows)
        for number in np.unique(shards):
            mask = shards == number
            vectors[mask] = self._shards[number][rows_in_shard[mask]]
        return vectors


def build_embeddings(
    index: IndexFolder, encoder: TextEncoder, *, progress: BuildProgress, shard_rows: int = _SHARD_ROWS
) -> Manifest:
    """Encode every passage, `shard_rows` per file. A killed build resumes after the last whole shard.

    The index has the part `passages`; the caller holds its lock.

    The same encoder, batch size and device give the same bytes. Another
    batch size or device may change the last digit; neither is part of the
    plan, so a build that ran out of memory can resume with smaller batches.

    Raises:
        DataError: a vector contains NaN or infinity.
        ConfigError: the device has too little memory.
    """
    made_of = {"passages": index.verify("passages").fingerprint, "encoder": identity_checksum(encoder.identity)}
    settings = {"encoder": dict(encoder.identity), "shard_rows": shard_rows}
    plan = Plan("embeddings", made_of, settings, {"sentence-transformers": version("sentence-transformers")})
    if (manifest := index.sound(plan)) is None:
        draft = Draft(index, plan)
        with closing(PassageStore(index)) as store:
            starts = range(0, len(store), shard_rows)
            missing = [number for number in range(len(starts)) if not draft.holds(_shard(number))]
            done = min((len(starts) - len(missing)) * shard_rows, len(store))
            progress.start("encoding passages", total=len(store), unit="passages", done=done)
            for number in missing:
                stop = min(starts[number] + shard_rows, len(store))
                blocks = []
                for first in range(starts[number], stop, _ENCODED_AT_ONCE):
                    texts = list(store.contents(first, min(first + _ENCODED_AT_ONCE, stop)))
                    blocks.append(_encode(encoder, texts, first, store))
                    progress.advance(len(texts))
                draft.save(_shard(number), np.concatenate(blocks))
            manifest = draft.finish({"passages": len(store), "dims": encoder.dims})
    # Outside of the parts, which hold nothing about this machine.
    location = {"encoder": identity_checksum(encoder.identity), "location": encoder.location}
    write_json(index.path / _LOCATION, location, indent=None)
    return manifest


def encoder_of(index: IndexFolder) -> tuple[Mapping[str, str], str]:
    """Return the identity of the encoder of an index's vectors, and its location on this machine ("" if unknown)."""
    identity: Mapping[str, str] = index.need("embeddings").plan.settings["encoder"]
    remembered = read_json(index.path / _LOCATION) or {}
    is_same_encoder = remembered.get("encoder") == identity_checksum(identity)
    return identity, str(remembered.get("location", "")) if is_same_encoder else ""


def _encode(encoder: TextEncoder, texts: list[str], start: int, store: PassageStore) -> Vectors:
    try:
        vectors: Vectors = encoder.encode_passages(texts)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the device has too little memory for encoder {encoder.name}; run the same build again with a smaller "
            "encoder.batch_size or max_tokens, and it resumes where it stopped"
        ) from error
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1) | ~vectors.any(axis=1))
    if len(broken):
        row = start + int(broken[0])
        raise DataError(
            f"encoder {encoder.name} gives no vector for passage {store.passage(row).id!r} in row {row} (NaN, "
            "infinity or all zero); choose another dtype or encoder, or remove the passage"
        )
    return vectors


def _shard(number: int) -> str:
    return f"shard-{number:05d}.npy"


# --- The part `vectors` ---


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """How vectors are indexed and searched; 0 or "" if a kind does not use the value.

    The kind flat compares with every vector; ivf-sq8 and
    ivf-pq look into the nearest clusters, at vectors rounded
    to one byte per dimension, or for ivf-pq per 8 dimensions.
    """

    kind: str
    factory: str = ""  # of faiss.index_factory
    training_rows: int = 0  # vectors that clusters and codes are learned from, spread evenly over all
    block_rows: int = _ADDED_AT_ONCE  # vectors added at once: the unit of resume of an inverted file
    refine: int = 1  # candidates per result that are compared once more, exactly, with the embeddings
    recall: float = 0.95  # target recall@10 against exact search that the effort of a search is tuned for, in (0, 1]


def choose(rows: int, dims: int, max_bytes: int, *, kind: str = "auto") -> VectorSettings:
    """Choose settings: of the given kind; or flat for few vectors, else the first that fits into `max_bytes`.

    >>> [choose(rows, 384, 8 << 30).kind for rows in (10_000, 1_000_000, 10_000_000, 50_000_000)]
    ['flat', 'ivf-sq8', 'ivf-sq8', 'ivf-pq']
    """
    # One byte a dimension, and the row of each vector.
    sq8_bytes = rows * (dims + 8)
    if kind == "flat" or (kind == "auto" and rows * dims * 4 <= _FLAT_BYTES):
        return VectorSettings("flat")
    if kind == "auto":
        kind = "ivf-sq8" if sq8_bytes <= max_bytes else "ivf-pq"
    elif kind == "ivf-sq8" and sq8_bytes > max_bytes:
        raise ConfigError(
            f"ivf-sq8 over {rows} passages of {dims} dimensions needs {sq8_bytes / (1 << 20):,.0f} MiB, more than "
            f"the {max_bytes / (1 << 20):,.0f} MiB of --max-memory; allow more, or take ivf-pq"
        )
    if kind == "ivf-pq" and rows < _PQ_LEAST_ROWS:
        raise ConfigError(f"ivf-pq learns its codes from {_PQ_LEAST_ROWS} passages or more, not {rows}; take flat")
    # The largest power of two up to 4 * sqrt(rows) that
    # leaves FAISS enough vectors per cluster, and at least 1.
    clusters = 1 << max(min(4 * math.isqrt(rows), rows // _LEAST_TRAINING), 1).bit_length() - 1
    # A quarter of the memory is for the vectors that clusters are learned from.
    most = max_bytes // 4 // (dims * 4)
    while clusters > 1 and clusters * _LEAST_TRAINING > most:
        clusters //= 2
    training, code_bytes, codes, refine = min(rows, clusters * _TRAINING, most), dims, "SQ8", 2
    if kind == "ivf-pq":
        code_bytes = next(parts for parts in range(max(dims // 8, 1), 0, -1) if dims % parts == 0)
        training, codes, refine = min(rows, max(training, _PQ_LEAST_ROWS)), f"PQ{code_bytes}x8", 10
    block_rows = max(_BLOCK_BYTES // (code_bytes + 8) // _ADDED_AT_ONCE, 1) * _ADDED_AT_ONCE
    return VectorSettings(kind, f"IVF{clusters},{codes}", training, block_rows, refine)


class VectorSearch:
    """Finds the closest vectors by cosine: exactly, or the candidates of a FAISS index, compared exactly.

    Equal scores keep the order of the rows, and no other query of
    a batch changes a result. Called from one thread at a time.
    """

    def __init__(self, embeddings: Embeddings, index: Any = None, *, refine: int = 1) -> None:
        """Search all vectors, or `refine` candidates per result of an open FAISS index over them."""
        self.embeddings = embeddings
        self._index = index
        self._refine = refine
        self.effort = 0
        self.clusters = 0 if index is None else load_faiss().extract_index_ivf(index).nlist

    def set_effort(self, effort: int) -> None:
        """Look at so many clusters in each search (nprobe of FAISS), 1 <= effort <= clusters."""
        self.effort = effort
        load_faiss().extract_index_ivf(self._index).nprobe = effort

    def to_gpus(self) -> None:
        """Search on all GPUs from now on, a share of the vectors on each, with the effort that is set.

        Raises:
            ConfigError: faiss finds no GPU.
        """
        faiss = load_faiss()
        if faiss.get_num_gpus() == 0:
            raise ConfigError("faiss finds no GPU; pip install 'reasonrag[gpu]' has GPU support, or leave out gpu")
        if self._index is None:
            self._index = faiss.IndexFlatIP(self.embeddings.dims)
            for _, block in self.embeddings.blocks():
                self._index.add(block)
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        self._index = faiss.index_cpu_to_all_gpus(self._index, co=options)

    def search(self, queries: Vectors, top_k: int) -> tuple[Vectors, Rows]:
        """Return `[n, top_k]` cosines and rows, best first, filled up with row -1 if the index holds fewer."""
        queries = np.ascontiguousarray(queries, np.float32)
        if self._index is None or not len(queries):
            candidates = self._closest(queries, top_k)
        else:
            candidates = list(self._index.search(queries, min(top_k * self._refine, self.embeddings.rows))[1])
        best_scores = np.full((len(queries), top_k), -np.inf, np.float32)
        best_rows = np.full((len(queries), top_k), -1, np.int64)
        for number, (query, rows) in enumerate(zip(queries, candidates, strict=True)):
            rows = np.sort(rows[rows >= 0])  # FAISS fills up with -1
            # Summed row by row in double precision: a product
            # of matrices would round by the shape of the batch.
            scores = (self.embeddings.take(rows).astype(np.float64) * query).sum(axis=1).astype(np.float32)
            order = np.argsort(-scores, kind="stable")[:top_k]
            best_scores[number, : len(order)] = scores[order]
            best_rows[number, : len(order)] = rows[order]
        return best_scores, best_rows

    def _closest(self, queries: Vectors, top_k: int) -> list[Rows]:
        """Return the rows of each query's `top_k` closest vectors, and all that rounding might put among them."""
        best_scores, best_rows = [np.empty(0, np.float32) for _ in queries], [np.empty(0, np.int64) for _ in queries]
        bounds = np.full((len(queries), 1), -np.inf, np.float32)  # the score of the last of the best
        for first, block in self.embeddings.blocks():
            scores = queries @ block.T  # [n, rows of the block] cosines
            for number in np.flatnonzero((scores >= bounds).any(axis=1)):
                hits = np.flatnonzero(scores[number] >= bounds[number])
                candidates = np.concatenate([best_scores[number], scores[number, hits]])
                rows = np.concatenate([best_rows[number], hits + first])
                if len(candidates) > top_k:
                    bounds[number] = np.partition(candidates, -top_k)[-top_k] - _ROUNDING
                    keep = candidates >= bounds[number]
                    candidates, rows = candidates[keep], rows[keep]
                best_scores[number], best_rows[number] = candidates, rows
        return best_rows


def build_vectors(
    index: IndexFolder, settings: VectorSettings, *, queries: Vectors, progress: BuildProgress
) -> Manifest | None:
    """Build the part `vectors` over the embeddings, or remove it if search is exact.

    The index has the part `embeddings`; the caller holds its
    lock. A killed build resumes after the last block. The
    effort of a search is tuned with `[n, dims]` queries.

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
    if not draft.holds(_INDEX):
        empty = faiss.index_factory(embeddings.dims, settings.factory, faiss.METRIC_INNER_PRODUCT)
        _build_inverted_file(draft, empty, embeddings, settings, progress)
    search = VectorSearch(embeddings, _read_index(draft.folder), refine=settings.refine)
    counts = {"passages": embeddings.rows, "dims": embeddings.dims}
    return draft.finish(counts | _tune(search, queries, settings.recall, progress))


def _build_inverted_file(
    draft: Draft, index: Any, embeddings: Embeddings, settings: VectorSettings, progress: BuildProgress
) -> None:
    """Learn clusters and codes, add vectors block by block, then merge the blocks' lists on disk.

    FAISS seeds k-means itself, always with the same seed.
    """
    faiss = load_faiss()
    trained = str(draft.scratch / _TRAINED)
    if not draft.holds(_TRAINED, scratch=True):
        progress.start(f"learning {settings.factory}", total=None, unit="clusters")
        sample = np.linspace(0, embeddings.rows, settings.training_rows, endpoint=False).astype(np.int64)
        index.train(embeddings.take(sample))
        _write_index(draft, _TRAINED, index, scratch=True)
    blocks = []
    progress.start("adding vectors", total=embeddings.rows, unit="vectors")
    for start in range(0, embeddings.rows, settings.block_rows):
        stop = min(start + settings.block_rows, embeddings.rows)
        name = f"block-{start:012d}.faiss"
        blocks.append(str(draft.scratch / name))
        if not draft.holds(name, scratch=True):
            index = faiss.read_index(trained)  # in memory: a mapped one cannot be added to
            for first in range(start, stop, _ADDED_AT_ONCE):
                rows = np.arange(first, min(first + _ADDED_AT_ONCE, stop))
                index.add_with_ids(embeddings.take(rows), rows)
            _write_index(draft, name, index, scratch=True)
        progress.advance(stop - start)
    index = faiss.read_index(trained)
    (draft.folder / _LISTS).unlink(missing_ok=True)  # of a process that was killed while it merged
    import_module("faiss.contrib.ondisk").merge_ondisk(index, blocks, str(draft.folder / _LISTS))
    # A name without a folder: `_read_index` finds the file next to the index, wherever that was moved.
    faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).filename = _LISTS
    _write_index(draft, _INDEX, index)


def _tune(search: VectorSearch, queries: Vectors, target: float, progress: BuildProgress) -> dict[str, int]:
    """Set the least effort that reaches a target recall@10, in (0, 1], for the first 256 of `[n, dims]` queries.

    Returns:
        `effort`, and the recall that it reaches, in thousandths.
    """
    queries = queries[:_TUNED_QUERIES]
    progress.start("tuning the search", total=None, unit="searches")
    exact = VectorSearch(search.embeddings).search(queries, TOP_K)

    def recall(effort: int) -> float:
        search.set_effort(effort)
        progress.advance()
        return recall_at_10(search.search(queries, TOP_K), exact)

    # Double the effort until it is enough; the least that is lies in the last step.
    high = 1
    while recall(high) < target and high < search.clusters:
        high = min(2 * high, search.clusters)
    # Recall is assumed to grow with the effort.
    lowest = high // 2 + 1
    reached = recall(lowest + bisect_left(range(lowest, high), target, key=recall))
    short = "" if reached >= target else f"; {target:.3f} was requested and cannot be reached, take another kind"
    progress.note(
        f"vectors: {search.effort} of {search.clusters} clusters per search give {reached:.3f} of exact search's ten "
        f"best, over {len(queries)} queries{short}"
    )
    return {"effort": search.effort, "recall_permille": round(1000 * reached)}


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


def open_vectors(index: IndexFolder, *, gpu: bool = False) -> VectorSearch:
    """Open the search over an index's vectors: FAISS if the part `vectors` exists, else exact over the embeddings.

    `gpu` copies the vectors to all GPUs and searches there.

    Raises:
        DataError: the embeddings are missing, or a file is missing or damaged.
        ConfigError: faiss is not installed, or finds no GPU.
    """
    search = VectorSearch(Embeddings(index))
    if index.manifest("vectors") is not None:
        manifest = index.verify("vectors")
        refine = int(manifest.plan.settings["refine"])
        search = VectorSearch(search.embeddings, _read_index(index.part("vectors")), refine=refine)
        search.set_effort(manifest.counts["effort"])
    if gpu:
        search.to_gpus()
    return search


def load_faiss() -> Any:
    """Import faiss; raise ConfigError if it is not installed."""
    if find_spec("faiss") is None:
        raise ConfigError("dense search needs faiss, which is not installed; pip install 'reasonrag[dense]'")
    return import_module("faiss")


def _write_index(draft: Draft, name: str, index: Any, *, scratch: bool = False) -> None:
    with draft.writing(name, scratch=scratch) as file:
        faiss = load_faiss()
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def _read_index(folder: Path) -> Any:
    """Open the FAISS index of a part so that its vectors and lists stay on disk until a search reads them."""
    faiss = load_faiss()
    path = str(folder / _INDEX)
    try:
        # IO_FLAG_ONDISK_SAME_DIR would do the same, but prints a
        # line to standard output. IO_FLAG_MMAP leaves such lists
        # unmapped, and the first search then crashes the process.
        index = faiss.read_index(path, faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY)
        lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
        lists.filename = str(folder / _LISTS)
        lists.do_mmap()
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} cannot be read as a FAISS index", quoting=error) from error
    return index


# --- The retriever ---


class DenseRetriever(LocalRetriever):
    """Finds the passages with the vectors closest to the query's, by cosine; equal ones in the order of the corpus.

    The other queries of a batch can change the last digit of a
    query's vector, and so its ranking if two passages are that
    close to each other. In half precision this happens more often.
    """

    def __init__(
        self,
        index: IndexFolder,
        encoder: TextEncoder | str | None = None,
        *,
        gpu: bool = False,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Open the vectors (on all GPUs if `gpu` is set) and, on `device`, the encoder.

        `encoder` is an open encoder, or its location; None
        takes its location when the index was built, or the Hub.

        Raises:
            DataError: a part is missing or damaged.
            ConfigError: the encoder cannot be opened, or the index was built with another one.
        """
        passages = index.verify("passages")
        # A query that another encoder encoded would find arbitrary passages, without an error.
        identity, location = encoder_of(index)
        self._vectors = open_vectors(index, gpu=gpu)
        if encoder is None or isinstance(encoder, str):
            encoder = _open_encoder(index, identity, encoder or location, device, trust_remote_code)
        if problem := differences(identity, encoder.identity):
            raise ConfigError(
                f"index {index.path} was built with another encoder than {encoder.name}: {problem}; open it with "
                f"{identity['name']}, or build it again"
            )
        self._encoder = encoder
        searched = index.manifest("vectors") or index.need("embeddings")
        # By content, so that the same passages have the same fingerprint under any file name.
        decisive = [passages.files[PASSAGES], dict(searched.files), dict(searched.counts), dict(identity)]
        # One thread, because FAISS on GPUs allows no second one, and the encoder uses all cores.
        super().__init__(PassageStore(index), identity=decisive)

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        queries = [valid_unicode(query) for query in queries]
        unique_queries = list(dict.fromkeys(query for query in queries if query.strip()))
        if not unique_queries or top_k < 1:
            return [() for _ in queries]
        try:
            vectors = self._encoder.encode_queries(unique_queries)
            scores, rows = self._vectors.search(vectors, min(top_k, self._vectors.embeddings.rows))
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError("dense search failed", quoting=error, cause="search") from error
        rankings: dict[str, tuple[Passage, ...]] = {}
        for query, query_scores, query_rows in zip(unique_queries, scores.tolist(), rows.tolist(), strict=True):
            best = zip(query_rows, query_scores, strict=True)
            rankings[query] = tuple(self._passages.passage(row, score) for row, score in best if row >= 0)
        return [rankings.get(query, ()) for query in queries]


def _open_encoder(
    index: IndexFolder, identity: Mapping[str, str], location: str, device: str | None, trust_remote_code: bool
) -> TextEncoder:
    """Open the encoder with the settings of an identity from its location, else from the Hub."""
    if not location and not identity["revision"]:
        raise ConfigError(
            f"index {index.path} was built with encoder {identity['name']} from a folder that is not known on this "
            "machine; give its path (--encoder)"
        )
    name = location or identity["name"]
    settings = {
        **{key: identity[key] for key in ("dtype", "query_prefix", "passage_prefix")},
        "name": name,
        "device": device,
        "batch_size": _QUERY_BATCH,
        "max_tokens": int(identity["max_tokens"]),
        "trust_remote_code": trust_remote_code,
    }
    revision = identity["revision"] if name == identity["name"] else ""
    return TextEncoder(validate(EncoderConfig, settings), revision=revision or None)
