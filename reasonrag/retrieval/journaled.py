"""Rankings in the run's journal: a query is looked up once per run, however often the run is stopped."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from reasonrag.core.types import Passage
from reasonrag.storage.journal import Journal


class JournalStore:
    """A `SearchStore` for one retriever."""

    def __init__(self, journal: Journal, fingerprint: str) -> None:
        """Keep rankings of the retriever with that fingerprint in `journal`."""
        self._journal = journal
        self._fingerprint = fingerprint

    def get(self, query: str, top_k: int) -> tuple[Passage, ...] | None:
        """The ranking kept for this query and `top_k`, or None."""
        kept = self._journal.call(self._key(query, top_k))
        return None if kept is None else tuple(Passage(**passage) for passage in kept)

    async def put(self, rankings: Mapping[str, tuple[Passage, ...]], top_k: int) -> None:
        """Keep the rankings of one lookup; returns once they are on disk."""
        await asyncio.gather(
            *(
                self._journal.put_call(self._key(query, top_k), "search", [asdict(passage) for passage in ranking])
                for query, ranking in rankings.items()
            )
        )

    def _key(self, query: str, top_k: int) -> str:
        asked = json.dumps(["search", self._fingerprint, query, top_k])
        return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
