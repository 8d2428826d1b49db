"""The `Retriever` protocol: queries in, ranked passages out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from reasonrag.core.types import Passage


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


def short_hash(value: Any) -> str:
    """Return 16 hex digits of a hash over a JSON value, for fingerprints."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
