"""BM25 searches in this process and over HTTP, next to bm25s alone, in CPU time.

    python -m benchmarks.retrieval [--passages 200000]

Passages have about 60 words of a Zipf vocabulary with English endings and stop-words; a query is ten words in a row of
a passage. The index is kept in `build/benchmarks`, because building it takes longer than searching; delete it there
to build another. `bm25s` is the library alone: its tokenizer and `BM25.retrieve`, in batches of 64, which finds rows
and reads no passage. Its numba backend, which is the measure, needs numba (`make bench` installs it beside the
environment). In each round all ways take turns; figures are medians over rounds. A server's CPU time is that of its
process. Clients compare each answer with what the search in process finds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import bm25s
import numpy as np

from benchmarks.process import memory_bytes
from benchmarks.table import ROOT, Table, options
from reasonrag.retrieval.bm25 import BM25Retriever, build_bm25
from reasonrag.retrieval.index import BM25Config, IndexFolder, PassagesConfig, Silent
from reasonrag.retrieval.passages import PassageStore, build_passages, open_corpus
from reasonrag.storage.files import read_json, write_json

MIB = 1 << 20
TOP_K, BATCH, ROUNDS, QUERIES = 3, 64, 3, 512
NUMBA = "bm25s, numba backend, batches of 64"
NUMPY = "bm25s, numpy backend, batches of 64"
ALONE = "one client, one query a request"
# Clients and queries a request, and requests in a round.
LOADS = {
    "one client, 64 queries a request": (1, BATCH, 8),
    "64 clients, one query a request": (64, 1, 256),
    "16 clients, one query a request": (16, 1, 256),
    ALONE: (1, 1, 128),
}
Ranking = list[dict[str, Any]]


# --- A corpus, the same every time, and its index ---


def vocabulary(rng: np.random.Generator, size: int = 300_000) -> np.ndarray:
    """Stop-words first, then words of syllables with endings: the stemmer has something to do."""
    from bm25s.stopwords import STOPWORDS_EN

    syllables = [a + b + c for a in "bcdfglmnprst" for b in "aeiou" for c in ("", "n", "r", "st", "l")]
    endings = ("", "", "s", "ed", "ing", "er", "ation", "ly")
    parts = rng.integers(0, len(syllables), (size, 3))
    stems = ["".join(syllables[part] for part in row[: 2 + row[0] % 2]) for row in parts]
    words = [stem + endings[end] for stem, end in zip(stems, rng.integers(0, len(endings), size), strict=True)]
    return np.array([*STOPWORDS_EN, *dict.fromkeys(words)], dtype=object)


def generate(path: Path, passages: int) -> None:
    rng = np.random.default_rng(0)
    words = vocabulary(rng)
    weights = np.cumsum(1 / (np.arange(len(words)) + 2.7))
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, passages, 10_000):
            count = min(10_000, passages - start)
            lengths = np.clip(rng.normal(60, 15, count), 10, 120).astype(int)
            drawn = words[np.searchsorted(weights, rng.random(lengths.sum()) * weights[-1])]
            for row, text in enumerate(np.split(drawn, np.cumsum(lengths)[:-1]), start):
                contents = f"{' '.join(text[:3])}\n{' '.join(text[3:])}"
                file.write(json.dumps({"id": str(row), "contents": contents}) + "\n")


def build(folder: Path) -> None:
    """Build the index of the corpus beside it, and write down what that took. Its process does nothing else."""
    index, started = IndexFolder(folder), time.process_time()
    with index.locked():
        build_passages(index, open_corpus(str(folder.with_suffix(".jsonl"))), PassagesConfig(), progress=Silent())
        build_bm25(index, BM25Config(), max_bytes=512 * MIB, progress=Silent())
    built = {"cpu_s": time.process_time() - started}
    built["peak_mib"] = memory_bytes("VmHWM") / MIB
    built["disk_mib"] = sum(index.need(part).size for part in ("passages", "bm25")) / MIB
    write_json(folder / "built.json", built)


def kept_index(passages: int) -> Path:
    """Return the folder of the index, which is built if it is not there."""
    folder = ROOT / "build" / "benchmarks" / f"retrieval-{passages}"
    if read_json(folder / "built.json") is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        generate(folder.with_suffix(".jsonl"), passages)
        subprocess.run([sys.executable, "-m", "benchmarks.retrieval", "--stage", "build", str(folder)], check=True)
    return folder


def questions(folder: Path, count: int) -> list[str]:
    """Ten words in a row of random passages."""
    store = PassageStore(IndexFolder(folder))
    texts = [
        store.passage(int(row)).contents.split() for row in np.random.default_rng(1).integers(0, len(store), count)
    ]
    return [" ".join(words[len(words) // 2 :][:10]) for words in texts]


# --- Servers, in processes of their own ---


def serve(folder: Path) -> None:
    from reasonrag.retrieval.server import ServeSettings
    from reasonrag.retrieval.server import serve as serve_until_signal

    sys.exit(serve_until_signal(BM25Retriever(IndexFolder(folder)), ServeSettings(port=0)))


class Server:
    """A process that serves, the load on it, and what it takes."""

    def __init__(self, stage: str, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.retrieval", "--stage", stage, str(folder)]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout
        self._url = self._child.stdout.readline().split()[2]
        self.wrong = 0
        self.asked = 0

    def cpu_s(self) -> float:
        return time.clock_gettime(~self._child.pid << 3 | 2)  # Linux: the CPU clock of a process, in nanoseconds

    def memory_mib(self) -> float:
        """Resident memory without the files that it maps."""
        return memory_bytes("RssAnon", self._child.pid) / MIB

    async def load(self, queries: list[str], expected: list[Ranking], load: tuple[int, int, int]) -> list[float]:
        """Ask; return the seconds of each request. Answers are compared with what is expected."""
        clients, size, requests = load
        numbers, seconds = iter(range(requests)), []

        async def client() -> None:
            for number in numbers:
                rows = [(number * size + offset) % len(queries) for offset in range(size)]
                asked = {"queries": [queries[row] for row in rows], "topk": TOP_K, "return_scores": True}
                started = time.perf_counter()
                async with session.post(f"{self._url}/retrieve", json=asked) as response:
                    body = await response.read()
                seconds.append(time.perf_counter() - started)
                self.wrong += json.loads(body) != {"result": [expected[row] for row in rows]}
                self.asked += 1

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client() for _ in range(clients)))
        return seconds

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(60)


# --- The measure ---


def library(folder: Path, backend: str) -> Callable[[list[str]], object]:
    """Return a search of bm25s alone, which has searched once (numba compiles then)."""
    import Stemmer

    raw = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
    raw.backend = backend
    if backend == "numba":
        raw.activate_numba_scorer()
    settings = BM25Config()
    stemmer = Stemmer.Stemmer(settings.stemmer)

    def search(queries: list[str]) -> object:
        words = bm25s.tokenize(
            queries, stopwords=settings.stopwords, stemmer=stemmer, return_ids=False, show_progress=False
        )
        return raw.retrieve(words, k=TOP_K, show_progress=False, backend_selection=backend)

    search(["warm up"])
    return search


def cpu_ms(search: Callable[[list[str]], object], queries: list[str], size: int) -> float:
    """CPU milliseconds of this process a query, in batches."""
    started = time.process_time()
    for begin in range(0, len(queries), size):
        search(queries[begin : begin + size])
    return 1000 * (time.process_time() - started) / len(queries)


def measure(folder: Path, table: Table) -> None:
    queries = questions(folder, QUERIES)
    started = time.process_time()
    retriever = BM25Retriever(IndexFolder(folder))
    opened_s = time.process_time() - started
    loop = asyncio.new_event_loop()

    def ours(batch: list[str]) -> list[Ranking]:
        rankings = loop.run_until_complete(retriever.search(batch, TOP_K))
        return [[{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in r] for r in rankings]

    expected = ours(queries)
    has_numba = importlib.util.find_spec("numba") is not None
    in_process: dict[str, tuple[Callable[[list[str]], object], int, int]] = {
        NUMPY: (library(folder, "numpy"), BATCH, BATCH // 2),
        "in process, batches of 64": (ours, BATCH, QUERIES),
        "in process, one by one": (ours, 1, QUERIES),
    }
    if has_numba:
        in_process[NUMBA] = library(folder, "numba"), BATCH, QUERIES
    found: dict[str, list[float]] = {}
    latency: dict[str, list[float]] = {}
    with contextlib.closing(Server("serve", folder)) as server:
        for _ in range(ROUNDS):
            for name, (search, size, count) in in_process.items():
                found.setdefault(name, []).append(cpu_ms(search, queries[:count], size))
            for load, numbers in LOADS.items():
                before = server.cpu_s()
                seconds = loop.run_until_complete(server.load(queries, expected, numbers))
                spent = 1000 * (server.cpu_s() - before) / (numbers[1] * numbers[2])
                found.setdefault(f"server, {load}", []).append(spent)
                latency.setdefault(f"server, {load}", []).extend(seconds)
        rows(table, found, latency, has_numba)
        table.row("wrong answers of the server", server.wrong, f"of {server.asked:,}", limit="== 0")
        table.row("memory of the server, without mapped files", server.memory_mib(), "MiB")
    table.row("open the index", opened_s, "CPU s", limit="<= 1")


def rows(table: Table, found: dict[str, list[float]], latency: dict[str, list[float]], has_numba: bool) -> None:
    for name, spent in found.items():
        table.row(name, median(spent), "CPU ms a query")
    for name in ("in process, batches of 64", *(f"server, {load}" for load in LOADS)):
        ratio = median(a / b for a, b in zip(found[NUMBA], found[name], strict=True)) if has_numba else None
        table.row(f"{name}, to bm25s with numba", ratio, "of its rate", limit=">= 0.7")
    for load in ("64 clients, one query a request", ALONE):
        table.row(f"server, {load}, median wait", 1000 * median(latency[f"server, {load}"]), "ms")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--stage", choices=["build", "serve"], help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        {"build": build, "serve": serve}[given.stage](given.folder)
        return
    sys.path.append(str(ROOT / "build" / "benchmarks" / "numba"))
    importlib.reload(bm25s)  # it looks for numba when it is imported, which reasonrag did
    table = Table(__doc__)
    folder = kept_index(given.passages)
    measure(folder, table)
    built = read_json(folder / "built.json") or {}
    table.row("build the index", built["cpu_s"], "CPU s")
    table.row("build the index, peak memory", built["peak_mib"], "MiB")
    table.row("the index on disk", built["disk_mib"], "MiB")
    table.note(f"{given.passages:,} passages, {TOP_K} a query; {ROUNDS} rounds. The index was built once and is kept.")
    table.show(given.json)


if __name__ == "__main__":
    main()
