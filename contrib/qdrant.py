"""Vectors in Qdrant: a server, or a folder that `QdrantClient(path=...)` wrote.

    reasonrag build-tree --retriever python:contrib.qdrant:open_retriever --encoder intfloat/e5-base-v2 \
        --set retrieval.backend.url=http://127.0.0.1:6333 --set retrieval.backend.collection=passages ...

Install `qdrant-client`. Options: collection, url or path, key_env, vector (the name of one of several), id, title,
text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from qdrant_client import AsyncQdrantClient
from qdrant_client.http.exceptions import ResponseHandlingException

from contrib.searching import QueryRetriever, needed, passages_of, query_vectors
from reasonrag import Config, ConfigError, Passage, Question


def open_retriever(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open a collection."""
    options = config.retrieval.backend
    collection, encode = needed(config, "collection"), query_vectors(config)
    if options.get("url"):
        client = AsyncQdrantClient(url=options["url"], api_key=os.environ.get(options.get("key_env", "")))
    else:
        try:
            client = AsyncQdrantClient(path=needed(config, "path"))
        except RuntimeError as error:  # another process has the folder open
            raise ConfigError("the Qdrant folder cannot be opened", quoting=error) from error

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        reply = await client.query_points(
            collection, query=await encode(query), using=options.get("vector"), limit=top_k, with_payload=True
        )
        documents = []
        for point in reply.points:
            payload = point.payload or {}
            documents.append((payload.get(options.get("id", "id"), str(point.id)), payload, point.score))
        return passages_of(documents, config)

    return QueryRetriever(
        "qdrant", config, find, close=client.close, transient=(OSError, ResponseHandlingException), concurrency=16
    )
