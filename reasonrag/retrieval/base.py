"""The `Retriever` protocol: queries in, ranked passages out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.event_loop import Worker
from reasonrag.core.types import Passage
from reasonrag.storage.files import short_hash

if TYPE_CHECKING:
    from reasonrag.retrieval.index.passages import PassageStore


class Retriever(Protocol):
    """Finds passages. Safe to call from many tasks at once."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same query may find other passages: a hash of corpus, kind of index and settings."""
        ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first. An empty query finds nothing.

        Raises:
            RetrievalError: all attempts failed.
        """
        ...

    async def aclose(self) -> None:
        """Close sockets and files. A second call does nothing."""
        ...


class LocalRetriever(ABC):
    """Searches an index in this process, in one thread: one call after another, so that the event loop is free."""

    # Queries times passages of the largest search that the event loop waits for, because handing it to the thread would
    # take longer. Such a search may run while the thread works on another one.
    _at_once = 0

    def __init__(self, passages: PassageStore, *, identity: Any) -> None:
        """Take the passages to return, and a JSON value of everything that decides a ranking, for the fingerprint."""
        self.fingerprint = short_hash(identity)
        self._passages = passages
        self._thread = Worker(type(self).__name__)

    @abstractmethod
    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]: ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return rankings as `Retriever` does; raise RetrievalError if the search fails, such as for lack of memory."""
        if len(queries) * len(self._passages) <= self._at_once:
            return self._search(list(queries), top_k)
        return await self._thread.call(self._search, list(queries), top_k)

    async def aclose(self) -> None:
        """Wait for the search in progress, then close thread and files."""
        await self._thread.aclose()
        self._passages.close()
