"""Which FAISS index fits how many vectors into how much memory, and how much effort its searches need."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from reasonrag.core.errors import ConfigError
from reasonrag.retrieval.index.embeddings import Vectors
from reasonrag.retrieval.index.faiss_search import FaissSearch, Rows, VectorSearch
from reasonrag.retrieval.index.folder import BuildProgress
from reasonrag.retrieval.index.passages import PassageStore

VectorKind = Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]
VECTOR_KINDS: tuple[VectorKind, ...] = get_args(VectorKind)  # in the order in which `auto` tries them

FLAT_BYTES = 128 << 20  # what one core compares a query with in some 20 ms
TOP_K = 10
SAMPLE = 256  # queries that a search is tuned with
_QUERY_WORDS = 8
_TIE = 1e-6
_BLOCK_BYTES = 64 << 20  # of codes that are in memory at once while an inverted file is built
_TUNING_BYTES = 64 << 20  # of scores, while the effort of a search is tuned
_SHARD_ROWS = 8192
_TRAINING = 64  # vectors a cluster; FAISS asks for 39 to 256
_LEAST_TRAINING = 39
_PQ_LEAST_ROWS = 256 * _LEAST_TRAINING
_LINKS, _EF_CONSTRUCTION = 32, 40  # FAISS's own default for the second


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """How vectors are indexed and searched; 0 if a kind does not use the value.

    The kind flat compares with every vector; hnsw follows a graph of neighbours; ivf-sq8 and ivf-pq look into the
    nearest clusters, at vectors rounded to one byte per dimension or to `code_bytes` in all.
    """

    kind: VectorKind
    clusters: int = 0  # of k-means (nlist)
    training_rows: int = 0  # vectors that the clusters are learned from, spread evenly over all
    code_bytes: int = 0  # of a rounded vector
    refine: int = 1  # candidates per result that are compared once more, exactly, with the embeddings; 1 skips this
    links: int = 0  # of a vector in the graph (M); the lowest layer has twice as many
    ef_construction: int = 0  # candidates that are looked at when a vector is linked
    block_rows: int = 0  # vectors added at once: the unit of resume of clusters; in a graph it slightly affects links
    recall: float = 0.95  # target recall@10 against exact search that the effort of a search is tuned for, in (0, 1]


def choose(
    rows: int, dims: int, max_bytes: int, *, kind: VectorKind | Literal["auto"] = "auto", recall: float = 0.95
) -> VectorSettings:
    """Choose settings: of the kind asked for, or of the first that fits of hnsw, ivf-sq8 and ivf-pq.

    `auto` takes flat as long as one core compares a query with all vectors in some 20 ms. Building and searching may
    take `max_bytes` of memory.

    Raises:
        ConfigError: nothing fits, or the kind that is asked for does not.

    >>> [choose(rows, 384, 8 << 30).kind for rows in (10_000, 1_000_000, 10_000_000, 50_000_000)]
    ['flat', 'hnsw', 'ivf-sq8', 'ivf-pq']
    """
    candidates = {name: _settings(name, rows, dims, max_bytes, recall) for name in VECTOR_KINDS}
    needed = {name: memory_of(settings, rows, dims) for name, settings in candidates.items()}
    if kind != "auto":
        if kind not in VECTOR_KINDS:
            raise ConfigError(f"there is no kind of vectors {kind!r}; choose auto, {', '.join(VECTOR_KINDS)}")
        if kind == "ivf-pq" and rows < _PQ_LEAST_ROWS:
            raise ConfigError(f"ivf-pq learns its codes from {_PQ_LEAST_ROWS} passages or more, not {rows}; take flat")
        if kind != "flat" and needed[kind] > max_bytes:
            raise ConfigError(
                f"{kind} over {rows} passages of {dims} dimensions does not fit: {shown(needed, max_bytes)}"
            )
        return candidates[kind]
    if needed["flat"] <= FLAT_BYTES:
        return candidates["flat"]
    for name in VECTOR_KINDS[1:]:
        if needed[name] <= max_bytes:
            return candidates[name]
    raise ConfigError(
        f"no kind of vectors over {rows} passages of {dims} dimensions fits: {shown(needed, max_bytes)}; allow "
        "more, or take the kind flat, which reads the disk for every query"
    )


def memory(rows: int, dims: int, max_bytes: int) -> Mapping[VectorKind, int]:
    """Return the bytes that each kind takes at most."""
    return {name: memory_of(_settings(name, rows, dims, max_bytes, 1.0), rows, dims) for name in VECTOR_KINDS}


def memory_of(settings: VectorSettings, rows: int, dims: int) -> int:
    """Return the bytes of memory that building or searching needs, whichever is more.

    For building, only the process's own memory counts: the embeddings are memory-mapped, and their pages can be dropped
    at any time. For searching, the mapped files count in full, although a search with less memory works from the disk.
    """
    vectors = rows * dims * 4
    if settings.kind == "flat":
        return vectors
    if settings.kind == "hnsw":
        # Lists grow by doubling while vectors are added, so building takes twice what searching does.
        return _TUNING_BYTES + 2 * rows * (dims * 4 + 9 * settings.links + 24)
    centroids = settings.clusters * dims * 4
    # The sample itself, and what the codes are learned from: 100,000 of it at most, as they are and their residuals.
    training = (settings.training_rows + 2 * min(settings.training_rows, 100_000)) * dims * 4
    building = _TUNING_BYTES + centroids + max(training, 2 * _BLOCK_BYTES + 2 * _SHARD_ROWS * dims * 4)
    return max(building, centroids + rows * (settings.code_bytes + 8))


def shown(needed: Mapping[VectorKind, int], max_bytes: int) -> str:
    """Describe how much memory every kind needs, and how much is allowed."""
    parts = ", ".join(f"{kind} {size / (1 << 20):,.0f} MiB" for kind, size in needed.items())
    return f"{parts}, of {max_bytes / (1 << 20):,.0f} MiB that are allowed (--max-memory)"


def _settings(kind: VectorKind, rows: int, dims: int, max_bytes: int, recall: float) -> VectorSettings:
    if kind == "flat":
        return VectorSettings(kind, recall=recall)
    if kind == "hnsw":
        return VectorSettings(
            kind, links=_LINKS, ef_construction=_EF_CONSTRUCTION, block_rows=_SHARD_ROWS, recall=recall
        )
    # The largest power of two up to 4 * sqrt(rows) that leaves FAISS enough vectors a cluster, and at least 1.
    clusters = 1 << max(min(4 * math.isqrt(rows), rows // _LEAST_TRAINING), 1).bit_length() - 1
    most = max_bytes // 4 // (dims * 4)
    while clusters > 1 and clusters * _LEAST_TRAINING > most:
        clusters //= 2
    training = min(rows, clusters * _TRAINING, most)
    code_bytes, refine = dims, 2
    if kind == "ivf-pq":
        code_bytes = next(parts for parts in range(max(dims // 8, 1), 0, -1) if dims % parts == 0)
        training, refine = min(rows, max(training, _PQ_LEAST_ROWS)), 10
    block_rows = max(_BLOCK_BYTES // (code_bytes + 8) // _SHARD_ROWS, 1) * _SHARD_ROWS
    return VectorSettings(kind, clusters, training, code_bytes, refine, block_rows=block_rows, recall=recall)


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


def recall_at_10(found: tuple[Vectors, Rows], exact: tuple[Vectors, Rows]) -> float:
    """Return the share of exact search's ten best that an approximate search finds too, in [0, 1].

    A vector as close as the exact tenth counts as found: of passages that occur twice, either may be returned.
    """
    (scores, rows), (exact_scores, exact_rows) = found, exact
    if not len(exact_scores):
        return 1.0
    tenth = np.min(np.where(exact_rows >= 0, exact_scores, np.inf), axis=1, keepdims=True)
    hits = ((rows >= 0) & (scores >= tenth - _TIE)).sum()
    return float(min(hits / (exact_rows >= 0).sum(), 1.0))


def least_effort(recall: Callable[[int], float], most: int, target: float) -> tuple[int, float]:
    """Return the smallest effort in [1, most] whose recall reaches `target`, and that recall; `most` if none does.

    Recall is assumed to grow with the effort, so the search is a bisection.

    >>> least_effort(lambda effort: effort / 100, 64, 0.3)
    (30, 0.3)
    >>> least_effort(lambda effort: effort / 100, 16, 0.3)
    (16, 0.16)
    """
    low, high, reached = 0, 1, recall(1)
    while reached < target and high < most:
        low, high = high, min(2 * high, most)
        reached = recall(high)
    while high - low > 1 and reached >= target:
        middle = (low + high) // 2
        middle_recall = recall(middle)
        if middle_recall >= target:
            high, reached = middle, middle_recall
        else:
            low = middle
    return high, reached


def tune(
    search: FaissSearch, reference: VectorSearch, queries: Vectors, target: float, progress: BuildProgress
) -> dict[str, int]:
    """Set the least effort that reaches a target recall@10, in (0, 1], for the first 256 of `[n, dims]` queries.

    What `reference` finds counts as correct.

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

    search.effort, reached = least_effort(recall, search.efforts, target)
    short = "" if reached >= target else f"; {target:.3f} was asked for and cannot be reached, take another kind"
    progress.note(
        f"vectors: looking at {search.effort} {search.unit} (of {search.efforts}) finds {reached:.3f} of what exact "
        f"search has among its ten best, over {len(queries)} queries{short}"
    )
    return {"effort": search.effort, "recall_permille": round(1000 * reached)}
