"""How much of what a question needs a retriever finds: any-gold@k and all-gold@k."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reasonrag.core.errors import DataError
from reasonrag.core.types import Question
from reasonrag.retrieval.base import Retriever

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Recall:
    """Of one question, at one cut.

    Args:
        any_gold: whether a gold passage is among the first k.
        all_gold: whether all of them are.
    """

    any_gold: bool
    all_gold: bool


async def recall(retriever: Retriever, questions: Sequence[Question], cuts: Sequence[int]) -> list[dict[int, Recall]]:
    """Search for each question's own words. A piece `ID#2` of a passage that was split counts for the passage.

    Args:
        retriever: what is measured.
        questions: those of `with_gold_ids`.
        cuts: the k, from 1.

    Returns:
        For each question, what was found at each k.
    """
    found: list[dict[int, Recall]] = []
    for start in range(0, len(questions), _AT_ONCE):
        batch = questions[start : start + _AT_ONCE]
        rankings = await retriever.search([question.question for question in batch], max(cuts))
        for question, ranking in zip(batch, rankings, strict=True):
            gold = gold_ids(question)
            ids = [_of_which(passage.id, gold) for passage in ranking]
            at = {k: gold & set(ids[:k]) for k in cuts}
            found.append({k: Recall(bool(hits), hits == gold) for k, hits in at.items()})
    return found


def with_gold_ids(questions: Sequence[Question]) -> list[Question]:
    """The questions that say in `metadata["gold_ids"]` which passages they need.

    Raises:
        DataError: none does.
    """
    needed = [question for question in questions if gold_ids(question)]
    if not needed:
        raise DataError("no question has metadata.gold_ids, the ids of the passages that it needs; recall needs them")
    return needed


def _of_which(passage: str, gold: set[str]) -> str:
    """The gold passage that a passage is a piece of; its own id where it is of none."""
    whole = re.sub(r"#[0-9]+$", "", passage)
    return whole if passage not in gold and whole in gold else passage


def gold_ids(question: Question) -> set[str]:
    """The ids of the passages that a question needs; empty where it does not say."""
    given = question.metadata.get("gold_ids")
    return {str(value) for value in given} if isinstance(given, list | tuple) else set()
