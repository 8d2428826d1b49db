"""Retrievers of LangChain and LlamaIndex as a `reasonrag.Retriever`.

    def open_retriever(config, questions):
        return as_retriever(vector_store.as_retriever(search_kwargs={"k": 3}), config)

How many passages such a retriever finds is its own setting: let it find `--top-k` or more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from contrib.searching import QueryRetriever, passages_of
from reasonrag import Config, ConfigError, Passage


def as_retriever(theirs: Any, config: Config) -> QueryRetriever:
    """Wrap LangChain's `BaseRetriever` or LlamaIndex' one; its class and `retrieval.identity` are its fingerprint."""
    name = f"{type(theirs).__module__}.{type(theirs).__qualname__}"
    if not (hasattr(theirs, "ainvoke") or hasattr(theirs, "retrieve")):
        raise ConfigError(f"{name} is not a retriever of LangChain or LlamaIndex")

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        if hasattr(theirs, "ainvoke"):
            items = await theirs.ainvoke(query)
        else:  # most of LlamaIndex' coroutines block the event loop
            items = await asyncio.to_thread(theirs.retrieve, query)
        return passages_of([_document(item) for item in items], config)

    return QueryRetriever(name, config, find, transient=(OSError, RuntimeError))


def _document(item: Any) -> tuple[Any, dict[str, Any], Any]:
    if hasattr(item, "page_content"):
        metadata = item.metadata
        return item.id or metadata.get("id"), {**metadata, "text": item.page_content}, metadata.get("score")
    return item.node.node_id, {**item.node.metadata, "text": item.node.get_content()}, item.score
