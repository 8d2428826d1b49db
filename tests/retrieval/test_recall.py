"""Which gold passages count as found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from reasonrag.retrieval.recall import Recall, recall
from reasonrag.types import Passage, Question


class Fixed:
    """Always finds the same."""

    fingerprint = "fixed"

    def __init__(self, *ids: str) -> None:
        self._found = tuple(Passage(id_, "x") for id_ in ids)

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [self._found[:top_k] for _ in queries]

    async def aclose(self) -> None:
        pass


def test_a_piece_counts_for_the_passage_that_was_split() -> None:
    question = Question("q", "who?", ("me",), "set", metadata={"gold_ids": ["a", "b#2"]})
    found, left_out = asyncio.run(recall(Fixed("c", "a#3", "b", "b#2"), [question], [1, 2, 3, 4]))
    assert left_out == 0
    assert found == [{1: Recall(False, False), 2: Recall(True, False), 3: Recall(True, False), 4: Recall(True, True)}]
