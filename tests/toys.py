"""Small invented things that tests share."""

from __future__ import annotations

from collections.abc import Sequence

from reasonrag.core.types import Passage, Question

QUESTION = Question("q1", "Who directed Jaws?", ("Steven Spielberg",), dataset="toy")

SPIELBERG = Passage("p1", "Jaws\nJaws is a film directed by Steven Spielberg.", 2.0)
LUCAS = Passage("p2", "Star Wars\nStar Wars is a film directed by George Lucas.", 1.0)


class ToyRetriever:
    """Finds the passages that share a word with the query, in the order given. Records what it was asked."""

    def __init__(self, passages: Sequence[Passage] = (SPIELBERG, LUCAS)) -> None:
        self.passages = passages
        self.queries: list[str] = []
        self.fingerprint = "toy"

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        self.queries += queries
        return [self._find(query)[:top_k] for query in queries]

    def _find(self, query: str) -> tuple[Passage, ...]:
        words = set(query.lower().split())
        return tuple(p for p in self.passages if words & set(p.contents.lower().split()))

    async def aclose(self) -> None:
        pass
