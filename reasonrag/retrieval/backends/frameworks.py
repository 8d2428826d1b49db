"""Retrievers of LangChain and LlamaIndex as ours. That they find `top_k` passages is for their own settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.watch import Worker
from reasonrag.retrieval.backends.base import LibraryBackend, Ranking, ranking
from reasonrag.retrieval.base import Retriever


def as_retriever(found: Any, config: RetrievalConfig) -> Retriever:
    """Return a `BaseRetriever` of LangChain or LlamaIndex as one of ours, and ours as it is.

    As nobody can look inside, the name of its class and `retrieval.identity` make the fingerprint.

    Raises:
        ConfigError: it is none of them.
    """
    if hasattr(found, "search") and hasattr(found, "fingerprint"):
        ours: Retriever = found
        return ours
    name = f"{type(found).__module__}.{type(found).__qualname__}"
    if not (hasattr(found, "ainvoke") or hasattr(found, "retrieve")):
        raise ConfigError(
            f"{name} is no retriever: it needs the members of reasonrag.Retriever (fingerprint, search, aclose), or to "
            "be one of LangChain's or LlamaIndex'"
        )

    def rows(items: Any) -> Iterator[tuple[Any, Any, Any]]:
        for item in items:
            if hasattr(item, "page_content"):
                id_, metadata, text, score = item.id, item.metadata, item.page_content, item.metadata.get("score")
            else:
                id_, metadata, text, score = item.node.node_id, item.node.metadata, item.node.get_content(), item.score
            yield id_ or metadata.get(config.backend.id or "id"), {**metadata, "text": text, "contents": None}, score

    async def find(queries: list[str], top_k: int) -> list[Ranking]:
        if hasattr(found, "ainvoke"):
            return [ranking(rows(await found.ainvoke(queries[0])), config.backend)]
        # Most coroutines of LlamaIndex' retrievers do not wait, and would stop the event loop.
        return [ranking(rows(await Worker(name, RetrievalError).call(found.retrieve, queries[0])), config.backend)]

    return LibraryBackend(config, find, known=name, name=name)
