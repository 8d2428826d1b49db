"""What a BM25 index of a million passages costs to build and to keep open, and how quick it is next to bm25s alone.

    python benchmarks/bm25_index.py [--passages 1000000] [--folder DIR]

Passages have about 60 words of a Zipf vocabulary with English endings and stop-words. Each stage has a process of its
own, so that its memory can be told; rates are medians of seven rounds, each of all ways one after another, over the
same questions. `bm25s` is the library alone: its tokenizer and `BM25.retrieve` with the numpy backend, which finds rows
and reads no passage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.corpus import open_corpus
from reasonrag.retrieval.index.folder import IndexFolder, Silent
from reasonrag.retrieval.index.passages import PassageStore, build_passages
from reasonrag.retrieval.index.postings import Tokenizer, build_bm25
from reasonrag.retrieval.index.settings import BM25Config, PassagesConfig

GIB = 1 << 30
MAX_BYTES = GIB // 2
TOP_K = 10
BATCH = 64
ROUNDS = 7


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
    """A corpus file, the same every time."""
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


def build(corpus: Path, folder: Path) -> dict[str, float]:
    """Seconds of both parts, and the peak of this process."""
    index = IndexFolder(folder)
    with index.locked():
        started = time.perf_counter()
        build_passages(index, open_corpus(str(corpus)), PassagesConfig(), progress=Silent())
        between = time.perf_counter()
        build_bm25(index, BM25Config(), max_bytes=MAX_BYTES, progress=Silent())
    done = time.perf_counter()
    return {"passages_s": between - started, "bm25_s": done - between, "peak": peak()}


def questions(folder: Path, count: int = 1000) -> list[str]:
    """Ten words in a row of random passages."""
    store = PassageStore(folder / "passages")
    rng = np.random.default_rng(1)
    texts = [store.passage(int(row)).contents.split() for row in rng.integers(0, len(store), count)]
    return [" ".join(words[len(words) // 2 :][:10]) for words in texts]


def search(folder: Path) -> dict[str, float]:
    """Seconds to open, resident memory, and queries a second."""
    asked = questions(folder)
    import bm25s  # its import is no part of opening

    started = time.perf_counter()
    retriever = BM25Retriever(IndexFolder(folder))
    opened_s = time.perf_counter() - started
    fresh = resident()
    loop = asyncio.new_event_loop()

    def ask(queries: list[str]) -> None:
        loop.run_until_complete(retriever.search(queries, TOP_K))

    for query in asked:
        ask([query])
    after = resident()
    raw = bm25s.BM25.load(folder / "bm25", mmap=False, show_progress=False)  # at its fastest
    tokenizer = Tokenizer(BM25Config())

    def ask_raw(queries: list[str]) -> None:
        raw.retrieve(tokenizer.words(queries), k=TOP_K, show_progress=False, backend_selection="numpy")

    ways: dict[str, tuple[Callable[[list[str]], object], int]] = {
        "bm25s, batches of 64": (ask_raw, BATCH),
        "reasonrag, batches of 64": (ask, BATCH),
        "reasonrag, one by one": (ask, 1),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        part = asked[turn * 2 * BATCH :][: 2 * BATCH]
        for name, (way, size) in ways.items():
            started = time.perf_counter()
            for begin in range(0, len(part), size):
                way(part[begin : begin + size])
            rates[name].append(len(part) / (time.perf_counter() - started))
    return {"opened_s": opened_s, "fresh": fresh, "after": after} | {name: median(r) for name, r in rates.items()}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def resident() -> float:
    """GiB, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / GIB


def in_a_process(stage: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--stage", stage, *arguments]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def report(passages: int, corpus: Path, folder: Path) -> None:
    if not corpus.exists():
        generate(corpus, passages)
    built = in_a_process("build", str(corpus), str(folder))
    found = in_a_process("search", str(folder))
    parts = {name: IndexFolder(folder).need(name).size / GIB for name in ("passages", "bm25")}  # type: ignore[arg-type]
    counts = IndexFolder(folder).need("bm25").counts
    print(f"{counts['passages']:,} passages, {counts['words']:,} words, {counts['postings']:,} postings\n")
    print(f"{'':<34}{'measured':>10}{'bound':>8}")
    print(f"{'build, passages (s)':<34}{built['passages_s']:>10.0f}")
    print(f"{'build, bm25 (s)':<34}{built['bm25_s']:>10.0f}")
    print(f"{'build, peak (GiB)':<34}{built['peak']:>10.2f}{6:>8}")
    print(f"{'corpus file (GiB)':<34}{corpus.stat().st_size / GIB:>10.2f}")
    print(f"{'disk, passages + bm25 (GiB)':<34}{parts['passages']:>5.2f} +{parts['bm25']:>3.2f}")
    print(f"{'open (s)':<34}{found['opened_s']:>10.2f}{1:>8}")
    print(f"{'resident when opened (GiB)':<34}{found['fresh']:>10.2f}")
    print(f"{'resident after 1,000 queries (GiB)':<34}{found['after']:>10.2f}{1.5:>8}")
    print(f"\n{'':<34}{'queries/s':>10}{'ratio':>8}")
    alone = found["bm25s, batches of 64"]
    for name in ("bm25s, batches of 64", "reasonrag, batches of 64", "reasonrag, one by one"):
        print(f"{name:<34}{found[name]:>10.0f}{found[name] / alone:>8.2f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--passages", type=int, default=1_000_000)
    options.add_argument("--folder", type=Path, help="keeps corpus and index; a temporary folder if left out")
    options.add_argument("--stage", choices=["build", "search"], help=argparse.SUPPRESS)
    options.add_argument("paths", nargs="*", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.stage:
        print(json.dumps({"build": build, "search": search}[given.stage](*given.paths)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report(given.passages, folder / f"corpus-{given.passages}.jsonl", folder / f"index-{given.passages}")


if __name__ == "__main__":
    main()
