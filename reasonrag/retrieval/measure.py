"""Measure an index: is it whole, how large and fast is it, and does it find its own passages?"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from typing import Any, NamedTuple

from reasonrag.core import event_loop
from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import DataError
from reasonrag.core.settings import named_path
from reasonrag.core.types import Question
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index import BuildProgress, IndexFolder
from reasonrag.retrieval.open import open_index
from reasonrag.retrieval.passages import PassageStore, self_queries

TOP_K = 10
_BATCH = 64

Report = dict[str, Any]


def examine(
    config: RetrievalConfig, *, trust_remote_code: bool = False, sample: int, seed: int, progress: BuildProgress
) -> Report:
    """Read every byte of an index, then search for pieces of `sample` of its own passages.

    Returns:
        `parts` (bytes, files, counts, seconds to read, by name), `open_s`, `found_at_1` and `found_at_10` in [0, 1],
        `queries_per_s` alone and in batches of 64; for approximate vectors also `recall_at_10` against exact search.

    Raises:
        DataError: a file is missing, truncated or changed.
    """
    index = IndexFolder(named_path(str(config.index)))
    index.need("passages")
    parts: dict[str, Report] = {}
    for part in index.parts():
        progress.start(f"checksums of {part}", total=index.need(part).size, unit="B")
        started = time.perf_counter()
        manifest = index.verify(part, fully=True)
        progress.advance(manifest.size)
        parts[part] = {
            "bytes": manifest.size,
            "files": len(manifest.files),
            "seconds": time.perf_counter() - started,
            "counts": dict(manifest.counts),
            "settings": dict(manifest.plan.settings),
            "fingerprint": manifest.fingerprint,
        }
    with closing(PassageStore(index)) as store:
        drawn = self_queries(store, sample, seed=seed)
        ids, queries = [store.passage(row).id for row, _ in drawn], [query for _, query in drawn]
    started = time.perf_counter()
    retriever = open_index(config, trust_remote_code=trust_remote_code)
    report: Report = {"parts": parts, "open_s": time.perf_counter() - started}
    progress.start("self-queries", total=len(queries), unit="queries")
    report |= event_loop.run(_search_for(retriever, ids, queries))
    progress.advance(len(queries))
    if config.kind != "bm25" and {"vectors", "embeddings"} <= set(index.parts()):
        from reasonrag.retrieval.dense import DenseRetriever

        dense = DenseRetriever(index, config.encoder, device=config.device, trust_remote_code=trust_remote_code)
        report["recall_at_10"] = dense.recall_at_10(queries)
    return report


async def _search_for(retriever: Retriever, ids: list[str], queries: list[str]) -> Report:
    async with aclosing(retriever):
        await retriever.search(queries[:1], TOP_K)  # untimed: it loads pages that are not in memory yet
        started = time.perf_counter()
        for query in queries:
            await retriever.search([query], TOP_K)
        alone = len(queries) / (time.perf_counter() - started)
        rankings = []
        started = time.perf_counter()
        for start in range(0, len(queries), _BATCH):
            rankings += await retriever.search(queries[start : start + _BATCH], TOP_K)
        batched = len(queries) / (time.perf_counter() - started)
    found_first = found_at_all = 0
    for passage_id, ranking in zip(ids, rankings, strict=True):
        ranked_ids = [passage.id for passage in ranking]
        found_first += ranked_ids[:1] == [passage_id]
        found_at_all += passage_id in ranked_ids
    return {
        "sample": len(queries),
        "found_at_1": found_first / len(queries),
        "found_at_10": found_at_all / len(queries),
        "queries_per_s": {"alone": alone, f"batches of {_BATCH}": batched},
    }


class GoldFound(NamedTuple):
    """Whether at least one gold passage of a question, and whether all of them, are among the first k."""

    any_gold: bool
    all_gold: bool


async def gold_recall(
    retriever: Retriever, questions: Sequence[Question], cuts: Sequence[int]
) -> list[dict[int, GoldFound]]:
    """Search for the text of each question, and return the gold passages found at each cut, a value of k from 1.

    The questions are those of `with_gold_ids`. A piece `ID#2` of a passage that was split counts as the passage.
    """
    results: list[dict[int, GoldFound]] = []
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        rankings = await retriever.search([question.question for question in batch], max(cuts))
        for question, ranking in zip(batch, rankings, strict=True):
            gold = gold_ids(question)
            ranked_ids = [_whole_passage(passage.id, gold) for passage in ranking]
            at_cuts = {}
            for cut in cuts:
                hits = gold & set(ranked_ids[:cut])
                at_cuts[cut] = GoldFound(bool(hits), hits == gold)
            results.append(at_cuts)
    return results


def with_gold_ids(questions: Sequence[Question]) -> list[Question]:
    """Keep the questions that name in `metadata["gold_ids"]` the passages that they need.

    Raises:
        DataError: no question does.
    """
    needed = [question for question in questions if gold_ids(question)]
    if not needed:
        raise DataError("no question has metadata.gold_ids, the ids of the passages that it needs; recall needs them")
    return needed


def gold_ids(question: Question) -> set[str]:
    """Return the ids of the passages that a question needs; empty if it does not name them."""
    ids = question.metadata.get("gold_ids")
    return {str(value) for value in ids} if isinstance(ids, list | tuple) else set()


def _whole_passage(passage_id: str, gold: set[str]) -> str:
    """Return the gold passage that this passage is a piece of, else its own id."""
    whole = re.sub(r"#[0-9]+$", "", passage_id)
    return whole if passage_id not in gold and whole in gold else passage_id
