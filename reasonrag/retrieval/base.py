"""The Retriever protocol: queries in, ranked passages out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reasonrag.core.types import Passage


class Retriever(Protocol):
    """Finds passages. Safe to call from many tasks at once."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same query could give other passages: corpus checksum, index kind and settings."""
        ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings of at most `top_k` passages, best first. An empty query finds nothing.

        Raises:
            RetrievalError: no answer after every retry.
        """
        ...

    async def aclose(self) -> None:
        """Release sockets and files. Calling it twice does no harm."""
        ...
