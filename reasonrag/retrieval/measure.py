"""Measure how often a search finds the passages that questions need."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reasonrag.core.errors import DataError
from reasonrag.core.types import Passage, Question
from reasonrag.retrieval.base import Retriever

_BATCH = 64


async def gold_recall(
    retriever: Retriever, questions: Sequence[Question], cutoffs: Sequence[int]
) -> dict[str, list[float]]:
    """Search for the text of each question, and see whether its gold passages are among the first k.

    The questions are those of `with_gold_ids`. A piece
    `ID#2` of a passage that was split counts as the passage.

    Returns:
        `any_gold@k` (at least one is) and `all_gold@k` for
        each cutoff, a value of k from 1: 0 or 1 by question.
    """
    columns: dict[str, list[float]] = {f"{name}@{k}": [] for name in ("any_gold", "all_gold") for k in cutoffs}
    rankings: list[tuple[Passage, ...]] = []
    for start in range(0, len(questions), _BATCH):
        queries = [question.question for question in questions[start : start + _BATCH]]
        rankings += await retriever.search(queries, max(cutoffs))
    for question, ranking in zip(questions, rankings, strict=True):
        gold = _gold_ids(question)
        ids = [passage.id for passage in ranking]
        ranked_ids = [id_ if id_ in gold else re.sub(r"#[0-9]+$", "", id_) for id_ in ids]
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
    if not (needed := [question for question in questions if _gold_ids(question)]):
        raise DataError("no question has metadata.gold_ids, the ids of the passages that it needs; recall needs them")
    return needed


def _gold_ids(question: Question) -> set[str]:
    ids = question.metadata.get("gold_ids")
    return {str(value) for value in ids} if isinstance(ids, list | tuple) else set()
