"""Measure an index: is it whole, how large and fast is it, and does it find its own passages?"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from typing import Any

from reasonrag.core import event_loop
from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import DataError
from reasonrag.core.settings import named_path
from reasonrag.core.types import Question
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index import BuildProgress, IndexFolder
from reasonrag.retrieval.open import open_index
from reasonrag.retrieval.passages import PassageStore, self_queries

_TOP_K = 10
_BATCH = 64

Report = dict[str, Any]


def examine(
    config: RetrievalConfig, *, trust_remote_code: bool = False, sample: int, seed: int, progress: BuildProgress
) -> Report:
    """Read every byte of an index, then search for pieces of `sample` of its own passages.

    Returns:
        `parts` (bytes, files and counts, by name; those of approximate vectors have their recall@10 against exact
        search), `open_s`, `found_at_1` and `found_at_10` in [0, 1], `queries_per_s` in batches of 64.

    Raises:
        DataError: a file is missing, truncated or changed.
    """
    index = IndexFolder(named_path(str(config.index)))
    index.need("passages")
    parts: dict[str, Report] = {}
    for part in index.parts():
        progress.start(f"checksums of {part}", total=index.need(part).size, unit="B")
        manifest = index.verify(part, fully=True)
        progress.advance(manifest.size)
        parts[part] = {"bytes": manifest.size, "files": len(manifest.files), "counts": dict(manifest.counts)}
    with closing(PassageStore(index)) as store:
        drawn = self_queries(store, sample, seed=seed)
        ids, queries = [store.passage(row).id for row, _ in drawn], [query for _, query in drawn]
    started = time.perf_counter()
    retriever = open_index(config, trust_remote_code=trust_remote_code)
    report: Report = {"parts": parts, "sample": len(queries), "open_s": time.perf_counter() - started}
    progress.start("self-queries", total=len(queries), unit="queries")
    report |= event_loop.run(_search_for(retriever, ids, queries))
    progress.advance(len(queries))
    return report


async def _search_for(retriever: Retriever, ids: list[str], queries: list[str]) -> Report:
    found_first = found_at_all = 0
    async with aclosing(retriever):
        await retriever.search(queries[:1], _TOP_K)  # untimed: it loads pages that are not in memory yet
        started = time.perf_counter()
        rankings = await _in_batches(retriever, queries, _TOP_K)
        seconds = time.perf_counter() - started
    for passage_id, ranked_ids in zip(ids, rankings, strict=True):
        found_first += ranked_ids[:1] == [passage_id]
        found_at_all += passage_id in ranked_ids
    total = len(queries)
    return {"found_at_1": found_first / total, "found_at_10": found_at_all / total, "queries_per_s": total / seconds}


async def _in_batches(retriever: Retriever, queries: Sequence[str], top_k: int) -> list[list[str]]:
    """Return the ids of the passages that each query finds."""
    rankings = []
    for start in range(0, len(queries), _BATCH):
        rankings += await retriever.search(queries[start : start + _BATCH], top_k)
    return [[passage.id for passage in ranking] for ranking in rankings]


async def gold_recall(
    retriever: Retriever, questions: Sequence[Question], cutoffs: Sequence[int]
) -> dict[str, list[float]]:
    """Search for the text of each question, and see whether its gold passages are among the first k.

    The questions are those of `with_gold_ids`. A piece `ID#2` of a passage that was split counts as the passage.

    Returns:
        `any_gold@k` (at least one is) and `all_gold@k` for each cutoff, a value of k from 1: 0 or 1 by question.
    """
    columns: dict[str, list[float]] = {f"{name}@{k}": [] for name in ("any_gold", "all_gold") for k in cutoffs}
    rankings = await _in_batches(retriever, [question.question for question in questions], max(cutoffs))
    for question, ranked_ids in zip(questions, rankings, strict=True):
        gold = _gold_ids(question)
        for place, passage_id in enumerate(ranked_ids):
            whole = re.sub(r"#[0-9]+$", "", passage_id)
            if passage_id not in gold and whole in gold:
                ranked_ids[place] = whole
        for k in cutoffs:
            hits = gold & set(ranked_ids[:k])
            columns[f"any_gold@{k}"].append(float(bool(hits)))
            columns[f"all_gold@{k}"].append(float(hits == gold))
    return columns


def with_gold_ids(questions: Sequence[Question]) -> list[Question]:
    """Keep the questions that name in `metadata["gold_ids"]` the passages that they need.

    Raises:
        DataError: no question does.
    """
    needed = [question for question in questions if _gold_ids(question)]
    if not needed:
        raise DataError("no question has metadata.gold_ids, the ids of the passages that it needs; recall needs them")
    return needed


def _gold_ids(question: Question) -> set[str]:
    ids = question.metadata.get("gold_ids")
    return {str(value) for value in ids} if isinstance(ids, list | tuple) else set()
