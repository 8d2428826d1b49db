"""A retrieval server under 64 clients, next to bm25s alone answering the same queries in batches.

    python benchmarks/retrieval_server.py [--index DIR]

DIR is a folder of `reasonrag index build --kind bm25`; without one, an index of 100,000 generated passages is built.
Each client sends its requests one after another, with one query each, and compares every answer with what a search in
process finds. Three rounds of bm25s, the index in process, and the server; medians. `bm25s` is the library alone: its
tokenizer and `BM25.retrieve` with the numpy backend over the same mapped files, which finds rows and reads no passage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import bm25s
from bm25_index import build, generate, questions

from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.index.postings import Tokenizer
from reasonrag.retrieval.index.settings import BM25Config

TOP_K, BATCH, CLIENTS, ROUNDS = 3, 64, 64, 3
QUERIES = 512  # that differ; at any moment 64 of them are asked
ALONE = 128  # of them for bm25s alone, which takes long over a million passages
SERVE = """
import sys
from pathlib import Path
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.server import ServeSettings, serve
sys.exit(serve(BM25Retriever(IndexFolder(Path(sys.argv[1]))), ServeSettings(port=0)))
"""
Ranking = list[dict[str, Any]]


class Load:
    """Answers of 64 clients that ask one after another, checked."""

    def __init__(self, url: str, queries: list[str], expected: list[Ranking]) -> None:
        self.url = url
        self.queries = queries
        self.expected = expected
        self.seconds: list[float] = []  # of each request
        self.errors = 0

    async def run(self, requests: int) -> float:
        """Requests a second."""
        numbers = iter(range(requests))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            started = time.perf_counter()
            await asyncio.gather(*(self._client(session, numbers) for _ in range(CLIENTS)))
            return requests / (time.perf_counter() - started)

    async def _client(self, session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            asked = number % len(self.queries)
            request = {"queries": [self.queries[asked]], "topk": TOP_K, "return_scores": True}
            started = time.perf_counter()
            try:
                async with session.post(f"{self.url}/retrieve", json=request) as response:
                    right = response.status == 200 and await response.json() == {"result": [self.expected[asked]]}
            except aiohttp.ClientError:
                right = False
            self.seconds.append(time.perf_counter() - started)
            self.errors += not right


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a server over the index, in a process of its own."""
    child = subprocess.Popen([sys.executable, "-c", SERVE, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    try:
        yield child.stdout.readline().split()[2]
    finally:
        child.terminate()
        child.wait(60)


def rate(search: Callable[[list[str]], object], queries: list[str]) -> float:
    """Queries a second, in batches."""
    started = time.perf_counter()
    for begin in range(0, len(queries), BATCH):
        search(queries[begin : begin + BATCH])
    return len(queries) / (time.perf_counter() - started)


def ratio(rates: list[float], references: list[float]) -> float:
    """The median over rounds."""
    return median(rate / reference for rate, reference in zip(rates, references, strict=True))


def measure(folder: Path, requests: int) -> None:
    index = IndexFolder(folder)
    queries = questions(folder, QUERIES)
    retriever = BM25Retriever(index)
    raw = bm25s.BM25.load(index.part("bm25"), mmap=True, show_progress=False)
    tokenizer = Tokenizer(BM25Config())
    loop = asyncio.new_event_loop()

    def alone(batch: list[str]) -> None:
        raw.retrieve(tokenizer.words(batch), k=TOP_K, show_progress=False, backend_selection="numpy")

    def in_process(batch: list[str]) -> list[Ranking]:
        rankings = loop.run_until_complete(retriever.search(batch, TOP_K))
        return [[{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in r] for r in rankings]

    expected = in_process(queries)
    rows: dict[str, list[float]] = {
        "bm25s, batches of 64": [],
        "in process, batches of 64": [],
        "server, 64 clients": [],
    }
    with server(folder) as url:
        load = Load(url, queries, expected)
        for _ in range(ROUNDS):
            figures = (
                rate(alone, queries[:ALONE]),
                rate(in_process, queries),
                loop.run_until_complete(load.run(requests)),
            )
            for row, figure in zip(rows.values(), figures, strict=True):
                row.append(figure)
    passages = index.need("passages").counts["passages"]
    print(f"{passages:,} passages, {ROUNDS * requests:,} requests, {load.errors} errors\n")
    print(f"{'':<34}{'queries/s':>10}{'ratio':>8}{'of in process':>15}")
    alone_rates, in_process_rates, _ = rows.values()
    for name, rates in rows.items():
        print(
            f"{name:<34}{median(rates):>10.0f}{ratio(rates, alone_rates):>8.2f}{ratio(rates, in_process_rates):>15.2f}"
        )
    cuts = quantiles(load.seconds, n=100)
    print(f"\nlatency: p50 {1000 * cuts[49]:.0f} ms, p99 {1000 * cuts[98]:.0f} ms")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--index", type=Path, help="a folder with the parts passages and bm25")
    options.add_argument("--passages", type=int, default=100_000, help="to generate where no index is given")
    options.add_argument("--requests", type=int, default=1000, help="of each client, in all rounds together")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.index
        if folder is None:
            corpus, folder = Path(scratch) / "corpus.jsonl", Path(scratch) / "index"
            generate(corpus, given.passages)
            build(corpus, folder)
        measure(folder, CLIENTS * given.requests // ROUNDS)


if __name__ == "__main__":
    main()
