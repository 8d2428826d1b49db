"""Is this index whole, how much does it take, how fast is it, and does it find what it holds?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from reasonrag.core.config import RetrievalConfig
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.retrieval.index.sample import self_queries
from reasonrag.retrieval.open import open_index

TOP_K = 10
_BATCH = 64

Report = dict[str, Any]


def examine(
    config: RetrievalConfig, *, trust_remote_code: bool = False, sample: int, seed: int, progress: BuildProgress
) -> Report:
    """Read every byte, then search for pieces of the index's own passages.

    Args:
        config: the index folder, and how it is searched.
        trust_remote_code: run Python code that comes with a model.
        sample: how many passages are searched for.
        seed: of the sample.
        progress: told what is looked at.

    Returns:
        `parts` (bytes, files, counts, seconds to read, by name), `open_s`, `resident_bytes` that opening and searching
        added, `found_at_1` and `found_at_10` in [0, 1], `queries_per_s` alone and in batches of 64; of approximate
        vectors also `recall_at_10` against exact search.

    Raises:
        DataError: a file is missing, cut or changed.
    """
    index = IndexFolder(Path(str(config.index)).expanduser())
    report: Report = {"parts": _read_all(index, progress)}
    before = resident()
    started = time.perf_counter()
    retriever = open_index(config, trust_remote_code=trust_remote_code)
    report["open_s"] = time.perf_counter() - started
    store = PassageStore(index.part("passages"))
    asked = [(store.passage(row).id, piece) for row, piece in self_queries(store, sample, seed=seed)]
    store.close()
    progress.start("self-queries", total=len(asked), unit="queries")
    report |= asyncio.run(_search_for(retriever, asked))
    if config.kind != "bm25" and {"vectors", "embeddings"} <= set(index.parts()):
        report["recall_at_10"] = asyncio.run(_recall(index, config, trust_remote_code, [piece for _, piece in asked]))
    progress.advance(len(asked))
    after = resident()
    report["resident_bytes"] = None if after is None or before is None else max(after - before, 0)
    return report


def _read_all(index: IndexFolder, progress: BuildProgress) -> dict[str, Report]:
    parts: dict[str, Report] = {}
    index.need("passages")
    for part in index.parts():
        size = index.need(part).size
        progress.start(f"checksums of {part}", total=size, unit="B")
        started = time.perf_counter()
        manifest = index.verify(part, fully=True)
        progress.advance(size)
        seconds = time.perf_counter() - started
        parts[part] = {
            "bytes": manifest.size,
            "files": len(manifest.files),
            "seconds": seconds,
            "counts": dict(manifest.counts),
            "settings": dict(manifest.plan.settings),
            "fingerprint": manifest.fingerprint,
        }
    return parts


async def _search_for(retriever: Retriever, asked: list[tuple[str, str]]) -> Report:
    queries = [query for _, query in asked]
    try:
        await retriever.search(queries[:1], TOP_K)  # the first one pays for pages that are not in memory yet
        alone = await _timed(len(queries), lambda i: retriever.search([queries[i]], TOP_K))
        rankings = []
        started = time.perf_counter()
        for start in range(0, len(queries), _BATCH):
            rankings += await retriever.search(queries[start : start + _BATCH], TOP_K)
        batched = len(queries) / (time.perf_counter() - started)
    finally:
        await retriever.aclose()
    places = [[p.id for p in ranking].index(name) if name in [p.id for p in ranking] else None
              for (name, _), ranking in zip(asked, rankings, strict=True)]  # fmt: skip
    return {
        "sample": len(queries),
        "found_at_1": sum(place == 0 for place in places) / len(places),
        "found_at_10": sum(place is not None for place in places) / len(places),
        "queries_per_s": {"alone": alone, f"batches of {_BATCH}": batched},
    }


async def _recall(index: IndexFolder, config: RetrievalConfig, trust_remote_code: bool, queries: list[str]) -> float:
    from reasonrag.retrieval.dense import DenseRetriever

    retriever = DenseRetriever(index, config.encoder, device=config.device, trust_remote_code=trust_remote_code)
    try:
        return await retriever.recall_at_10(queries)
    finally:
        await retriever.aclose()


async def _timed(count: int, call: Callable[[int], Awaitable[object]]) -> float:
    started = time.perf_counter()
    for i in range(count):
        await call(i)
    return count / (time.perf_counter() - started)


def resident() -> int | None:
    """Bytes of memory that this process holds now, mapped files included; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
