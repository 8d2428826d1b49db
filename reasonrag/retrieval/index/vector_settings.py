"""Which FAISS index fits how many vectors into how much memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from reasonrag.core.errors import ConfigError

VectorKind = Literal["flat", "hnsw", "ivf-sq8", "ivf-pq"]
VECTOR_KINDS: tuple[VectorKind, ...] = get_args(VectorKind)  # the more memory the better, or small enough: tried first

FLAT_BYTES = 128 << 20  # what one core compares a query with in some 20 ms
_BLOCK_BYTES = 64 << 20  # of codes that are in memory at once while an inverted file is built
_TUNING_BYTES = 64 << 20  # of scores, while the effort of a search is tuned
_SHARD_ROWS = 8192
_TRAINING = 64  # vectors a cluster; FAISS asks for 39 to 256
_LEAST_TRAINING = 39
_PQ_LEAST_ROWS = 256 * _LEAST_TRAINING
_LINKS, _EF_CONSTRUCTION = 32, 40  # FAISS's own default for the second


@dataclass(frozen=True, slots=True)
class VectorSettings:
    """How vectors are searched; zero is what a kind has no use for.

    Args:
        kind: flat compares with every vector; hnsw follows a graph of neighbours; ivf-sq8 and ivf-pq look into the
            nearest clusters, at vectors rounded to a byte a dimension or to `code_bytes` in all.
        clusters: k-means clusters (nlist).
        training_rows: vectors that they are learned from, spread evenly over all.
        code_bytes: bytes of a vector.
        refine: candidates per result that are compared once more, exactly, with the embeddings; 1 is none.
        links: of a vector in the graph (M); the lowest layer has twice as many.
        ef_construction: candidates when a vector is linked.
        block_rows: vectors that are added at once. Of clusters they are the unit of resume; of a graph they decide a
            little of what it looks like.
        recall: recall@10 against exact search that the effort of a search is tuned for, in (0, 1].
    """

    kind: VectorKind
    clusters: int = 0
    training_rows: int = 0
    code_bytes: int = 0
    refine: int = 1
    links: int = 0
    ef_construction: int = 0
    block_rows: int = 0
    recall: float = 0.95


def choose(
    rows: int, dims: int, max_bytes: int, *, kind: VectorKind | Literal["auto"] = "auto", recall: float = 0.95
) -> VectorSettings:
    """The settings of a kind, or of the first that fits: flat while a search takes no 20 ms, hnsw, ivf-sq8, ivf-pq.

    Args:
        rows: vectors.
        dims: their dimensions.
        max_bytes: what building and searching may take.
        kind: one of VECTOR_KINDS, or `auto`.
        recall: see VectorSettings.

    Raises:
        ConfigError: nothing fits, or not the kind that is asked for.

    >>> [choose(rows, 384, 8 << 30).kind for rows in (10_000, 1_000_000, 10_000_000, 50_000_000)]
    ['flat', 'hnsw', 'ivf-sq8', 'ivf-pq']
    """
    found = {name: _settings(name, rows, dims, max_bytes, recall) for name in VECTOR_KINDS}
    needed = {name: memory_of(settings, rows, dims) for name, settings in found.items()}
    if kind != "auto":
        if kind not in VECTOR_KINDS:
            raise ConfigError(f"there is no kind of vectors {kind!r}; choose auto, {', '.join(VECTOR_KINDS)}")
        if kind == "ivf-pq" and rows < _PQ_LEAST_ROWS:
            raise ConfigError(f"ivf-pq learns its codes from {_PQ_LEAST_ROWS} passages or more, not {rows}; take flat")
        if kind != "flat" and needed[kind] > max_bytes:
            raise ConfigError(
                f"{kind} over {rows} passages of {dims} dimensions does not fit: {shown(needed, max_bytes)}"
            )
        return found[kind]
    if needed["flat"] <= FLAT_BYTES:
        return found["flat"]
    for name in VECTOR_KINDS[1:]:
        if needed[name] <= max_bytes:
            return found[name]
    raise ConfigError(
        f"no kind of vectors over {rows} passages of {dims} dimensions fits: {shown(needed, max_bytes)}; allow "
        "more, or take the kind flat, which reads the disk for every query"
    )


def memory(rows: int, dims: int, max_bytes: int) -> Mapping[VectorKind, int]:
    """Bytes that each kind takes at most, by kind."""
    return {name: memory_of(_settings(name, rows, dims, max_bytes, 1.0), rows, dims) for name in VECTOR_KINDS}


def memory_of(settings: VectorSettings, rows: int, dims: int) -> int:
    """Bytes that building or searching wants.

    While it is built, what the process has of its own: the embeddings are mapped, and their pages may be dropped at any
    time. While it is searched, the mapped files as if they were read whole: less works too, from the disk.
    """
    vectors = rows * dims * 4
    if settings.kind == "flat":
        return vectors
    if settings.kind == "hnsw":
        # Lists grow by doubling while vectors are added, so that building takes twice what is searched in the end.
        return _TUNING_BYTES + 2 * rows * (dims * 4 + 9 * settings.links + 24)
    centroids = settings.clusters * dims * 4
    # The sample itself, and what the codes are learned from: 100,000 of it at most, as they are and their residuals.
    training = (settings.training_rows + 2 * min(settings.training_rows, 100_000)) * dims * 4
    building = _TUNING_BYTES + centroids + max(training, 2 * _BLOCK_BYTES + 2 * _SHARD_ROWS * dims * 4)
    return max(building, centroids + rows * (settings.code_bytes + 8))


def shown(needed: Mapping[VectorKind, int], max_bytes: int) -> str:
    """What every kind needs, for people."""
    parts = ", ".join(f"{kind} {size / (1 << 20):,.0f} MiB" for kind, size in needed.items())
    return f"{parts}, of {max_bytes / (1 << 20):,.0f} MiB that are allowed (--max-memory)"


def _settings(kind: VectorKind, rows: int, dims: int, max_bytes: int, recall: float) -> VectorSettings:
    if kind == "flat":
        return VectorSettings(kind, recall=recall)
    if kind == "hnsw":
        return VectorSettings(
            kind, links=_LINKS, ef_construction=_EF_CONSTRUCTION, block_rows=_SHARD_ROWS, recall=recall
        )
    clusters = _power_of_two(min(4 * math.isqrt(rows), rows // _LEAST_TRAINING))
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


def _power_of_two(most: int) -> int:
    """The largest one that is not above `most`; 1 below.

    >>> _power_of_two(1789), _power_of_two(0)
    (1024, 1)
    """
    return 1 << max(most, 1).bit_length() - 1
