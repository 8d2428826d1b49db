"""Kinds of vector search next to each other: what they cost to build, on disk and in memory, and what they find.

    python -m benchmarks vectors [--rows 200000] [--threads 1] [--real INDEX ...]

Queries are passages' vectors with noise on them. Made vectors lie in overlapping clusters of a space of few directions,
as embeddings of text do; with --real they are mixtures of neighbouring passages of dense indexes, with some noise.
Memory is what the process has of its own (the files it maps come on top and can be dropped at any time). Speeds are
medians of three runs, next to faiss.IndexFlatIP in the same run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np

from benchmarks.process import memory_bytes
from benchmarks.table import Table, options
from reasonrag.retrieval.index.embeddings import Embeddings
from reasonrag.retrieval.index.folder import Draft, IndexFolder, Plan, Silent
from reasonrag.retrieval.index.vectors import (
    VECTOR_KINDS,
    ExactSearch,
    build_vectors,
    choose,
    open_vectors,
    recall_at_10,
)

DIMS, MAX_BYTES, SHARD, TOP_K = 384, 8 << 30, 8192, 10
REFERENCES = ("faiss.IndexFlatIP", "numpy matmul")


def made(rows: int, rng: np.random.Generator) -> np.ndarray:
    """`[rows, 384]`: 2,000 clusters of unequal size in a space of 32 directions, and a little of all others."""
    directions = rng.standard_normal((32, DIMS)).astype(np.float32)
    centres = rng.standard_normal((2000, 32)).astype(np.float32)
    weights = rng.zipf(1.2, 2000).clip(max=50)
    cluster = rng.choice(2000, size=rows, p=weights / weights.sum())
    vectors = np.empty((rows, DIMS), np.float32)
    for start in range(0, rows, SHARD):
        place = centres[cluster[start : start + SHARD]]
        place += rng.standard_normal(place.shape).astype(np.float32)
        block = place @ directions
        vectors[start : start + SHARD] = block + 1.5 * rng.standard_normal(block.shape).astype(np.float32)
    return unit(vectors)


def real(rows: int, indexes: list[Path], rng: np.random.Generator) -> np.ndarray:
    """`[rows, dims]`: the passages themselves, then each mixed with one of its 20 neighbours."""
    found = [Embeddings(IndexFolder(path)) for path in indexes]
    base = np.concatenate([block for embeddings in found for _, block in embeddings.blocks()])
    near = faiss.knn(base, base, 21, metric=faiss.METRIC_INNER_PRODUCT)[1]
    first = rng.integers(len(base), size=rows)
    other = near[first, rng.integers(1, 21, size=rows)]
    share = rng.uniform(0, 0.5, size=(rows, 1)).astype(np.float32)
    noise = np.float32(0.3 / base.shape[1] ** 0.5) * rng.standard_normal((rows, base.shape[1]), np.float32)
    vectors = (1 - share) * base[first] + share * base[other] + noise
    vectors[: len(base)] = base[:rows]
    return unit(vectors)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write_embeddings(index: IndexFolder, vectors: np.ndarray) -> None:
    """The part `embeddings`, without the passages it would be of."""
    checksum = hashlib.sha256(vectors.tobytes()).hexdigest()
    plan = Plan("embeddings", {"passages": checksum}, {"encoder": {}, "shard_rows": SHARD})
    draft = Draft(index, plan)
    for start in range(0, len(vectors), SHARD):
        with draft.writing(f"shard-{start // SHARD:05d}.npy") as file:
            np.lib.format.write_array(file, vectors[start : start + SHARD])
    draft.finish({"passages": len(vectors), "dims": vectors.shape[1], "cut": 0})


def memory_mib(kind: str = "RssAnon") -> float:
    return memory_bytes(kind) / (1 << 20)


class Peak(threading.Thread):
    """The most memory of its own that the process had, in MB, while the body ran."""

    def __enter__(self) -> Peak:
        self.most, self.ended = 0.0, threading.Event()
        self.start()
        return self

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.most = max(self.most, memory_mib())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


def rate(search: Callable[[np.ndarray], Any], queries: np.ndarray, size: int) -> float:
    """Median queries per second of three runs of a second each, in batches of one size."""
    found = []
    for _ in range(3):
        started, asked = time.perf_counter(), 0
        while time.perf_counter() - started < 1:
            first = asked % (len(queries) - size + 1)
            search(queries[first : first + size])
            asked += size
        found.append(asked / (time.perf_counter() - started))
    return median(found)


def reference(name: str, vectors: np.ndarray) -> Callable[[np.ndarray], Any]:
    if name == "faiss.IndexFlatIP":
        flat = faiss.IndexFlatIP(vectors.shape[1])
        flat.add(vectors)
        return lambda queries: flat.search(queries, TOP_K)

    def search(queries: np.ndarray) -> np.ndarray:
        scores = queries @ vectors.T
        best = np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:]
        return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)

    return search


def measure(folder: Path, kind: str, threads: int) -> dict[str, float]:
    """One kind, in a process of its own, so that its memory is its own."""
    faiss.omp_set_num_threads(threads)
    index, queries = IndexFolder(folder), np.load(folder / "queries.npy")
    tuning, asked = queries[:256], queries[256:]
    embeddings = Embeddings(index)
    if kind in REFERENCES:
        search = reference(kind, np.concatenate([block for _, block in embeddings.blocks()]))
        return {"one": rate(search, asked, 1), "batch": rate(search, asked, 64), "recall": 1.0}
    settings = choose(embeddings.rows, embeddings.dims, MAX_BYTES, kind=kind)
    before, started = memory_mib(), time.perf_counter()
    with Peak() as peak:
        manifest = build_vectors(index, settings, queries=tuning, progress=Silent())
    built = {"build_s": time.perf_counter() - started, "peak": max(peak.most - before, 0)}
    return built | {"disk": (manifest or index.need("embeddings")).size / 1e6}


def searched(folder: Path, threads: int) -> dict[str, float]:
    """What was built last, opened in a fresh process."""
    faiss.omp_set_num_threads(threads)
    index, asked = IndexFolder(folder), np.load(folder / "queries.npy")[256:]
    mapped, own = memory_mib("RssFile"), memory_mib()
    started = time.perf_counter()
    search = open_vectors(index)
    opened = time.perf_counter() - started
    found = search.search(asked, TOP_K)
    row = {"open_s": opened, "mapped": memory_mib("RssFile") - mapped, "own": memory_mib() - own}
    row |= {"effort": getattr(search, "effort", 0)}
    row |= {"one": rate(lambda q: search.search(q, TOP_K), asked, 1)}
    row |= {"batch": rate(lambda q: search.search(q, TOP_K), asked, 64)}
    return row | {"recall": recall_at_10(found, ExactSearch(Embeddings(index)).search(asked, TOP_K))}


def child(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vectors", "--child", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


SHOWN = {
    "build_s": ("build", "s"),
    "peak": ("memory of its own, building", "MB"),
    "disk": ("disk", "MB"),
    "open_s": ("open", "s"),
    "own": ("memory of its own, searching", "MB"),
    "recall": ("recall@10", "of exact"),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--real", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(given.threads))
    if given.child:
        kind, folder = given.child
        row = searched(Path(folder), given.threads) if kind == "search" else measure(Path(folder), kind, given.threads)
        print(json.dumps(row))
        return
    table = Table(__doc__)
    rng = np.random.default_rng(0)
    vectors = real(given.rows, given.real, rng) if given.real else made(given.rows, rng)
    noise = 0.4 / vectors.shape[1] ** 0.5 * rng.standard_normal((512, vectors.shape[1]), np.float32)
    queries = unit(vectors[rng.choice(len(vectors), 512, replace=False)] + noise)
    with tempfile.TemporaryDirectory() as folder:
        write_embeddings(IndexFolder(Path(folder)), vectors)
        np.save(Path(folder) / "queries.npy", queries)
        del vectors
        rows = {name: child(name, folder) for name in REFERENCES}
        for kind in VECTOR_KINDS:
            rows[kind] = child(kind, folder) | child("search", folder)
    flat = rows["faiss.IndexFlatIP"]
    for name, row in rows.items():
        for key, (what, measured_in) in SHOWN.items():
            if key in row and name not in REFERENCES:
                table.row(f"{name}: {what}", row[key], measured_in)
        for key, size in (("one", 1), ("batch", 64)):
            table.row(f"{name}: queries, {size} at a time", row[key], "a second")
            if name != "faiss.IndexFlatIP":
                table.row(
                    f"{name}: queries, {size} at a time, to faiss.IndexFlatIP", row[key] / flat[key], "of its rate"
                )
    table.note(f"{given.rows:,} vectors of {DIMS} dimensions, {given.threads} thread(s)")
    table.show(given.json)


if __name__ == "__main__":
    main()
