"""Databases: Qdrant, Postgres with pgvector, and the full-text search of SQLite (FTS5)."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.watch import Worker
from reasonrag.retrieval.backends.base import LibraryBackend, Ranking, library, needed, query_encoder, ranking

_TABLE, _PATH = "retrieval.backend.collection, the name of a table or collection", "retrieval.backend.path"
_NEAREST = (
    "SELECT {id}, {title}, {text}, 1 - ({vector} <=> %(vector)s::vector) FROM {table} "
    "ORDER BY {vector} <=> %(vector)s::vector LIMIT %(top_k)s"
)
_BM25 = (
    "SELECT {id}, {title}, {text}, -bm25({table}) FROM {table} WHERE {table} MATCH :query "
    "ORDER BY bm25({table}), rowid LIMIT :top_k"
)


def open_qdrant(config: RetrievalConfig) -> LibraryBackend:
    """Open a collection on a Qdrant server, or in a folder that `QdrantClient(path=...)` wrote.

    Raises:
        ConfigError: qdrant-client or the encoder is missing, or it is not said where and what the collection is.
    """
    qdrant, names = library("qdrant_client", config, "qdrant-client"), config.backend
    collection, vectors = needed(names.collection, config, _TABLE), query_encoder(config)
    at: dict[str, Any] = {"timeout": max(1, round(config.timeout_s))}
    if config.url:
        at |= {"url": config.url[0], "api_key": os.environ.get(names.key_env or ""), "check_compatibility": False}
    else:
        at["path"] = str(_existing(config))
    try:
        client = qdrant.AsyncQdrantClient(**at)
    except RuntimeError as error:  # another process has the folder open
        raise ConfigError("the folder of Qdrant cannot be opened", quoting=error) from error

    async def find(queries: list[str], top_k: int) -> list[Ranking]:
        limits = {"using": names.vector, "limit": top_k, "with_payload": True}
        asked = [qdrant.models.QueryRequest(query=vector, **limits) for vector in await vectors.encode(queries)]
        rankings = []
        for reply in await client.query_batch_points(collection, asked):
            points = [(point.payload or {}, point) for point in reply.points]
            rows = ((fields.get(names.id, str(point.id)), fields, point.score) for fields, point in points)
            rankings.append(ranking(rows, names))
        return rankings

    gone = library("qdrant_client.http.exceptions", config, "qdrant-client").ResponseHandlingException
    errors: dict[str, Any] = {"absent": (gone,), "refusals": (ValueError,)}
    return LibraryBackend(config, find, known=vectors.identity, close=client.close, max_queries=64, **errors)


def open_pgvector(config: RetrievalConfig) -> LibraryBackend:
    """Open a Postgres table, whose vectors are compared by cosine, or ask a statement of the user's.

    The password comes from PGPASSWORD or ~/.pgpass, options such as hnsw.ef_search from PGOPTIONS.

    Raises:
        ConfigError: psycopg or the encoder is missing, or it is not said where and what the table is.
    """
    psycopg = library("psycopg", config, "psycopg[binary]")
    (url, *_) = needed(config.url, config, "retrieval.url, such as postgresql://HOST/NAME")

    def connect() -> Any:
        return psycopg.connect(url, autocommit=True, connect_timeout=max(1, round(min(config.timeout_s, 10))))

    return _open_sql(config, connect, _NEAREST, absent=(psycopg.OperationalError,), refusals=(psycopg.Error,))


def open_sqlite(config: RetrievalConfig) -> LibraryBackend:
    """Open an FTS5 table, whose rows with any of a query's words are ranked by BM25.

    Raises:
        ConfigError: there is no such file, or it is not said which table.
    """
    address = f"{_existing(config).resolve().as_uri()}?mode=ro"
    return _open_sql(config, lambda: sqlite3.connect(address, uri=True, check_same_thread=False), _BM25, id_="rowid")


def _open_sql(
    config: RetrievalConfig, connect: Callable[[], Any], sql: str, *, id_: str = "id", **errors: Any
) -> LibraryBackend:
    """Ask in SQL, by a few connections, in threads. Rows are id, title, text and score, best first."""
    names = config.backend
    columns = {"id": names.id or id_, "title": names.title or "title", "text": names.text or "text"}
    columns |= {"vector": names.vector or "embedding", "table": names.collection or ""}
    statement = names.sql or sql.format(**columns)
    if not names.sql:
        needed(names.collection, config, _TABLE)
    vectors = query_encoder(config) if "%(vector)s" in statement else None
    plain = names.model_copy(update={"title": "title", "text": "text"})
    idle: list[Any] = []

    def ask(values: dict[str, Any]) -> list[Any]:
        connection = idle.pop() if idle else connect()
        try:
            rows: list[Any] = connection.execute(statement, values).fetchall()
        except BaseException:
            connection.close()
            raise
        idle.append(connection)
        return rows

    async def find(queries: list[str], top_k: int) -> list[Ranking]:
        values: dict[str, Any] = {"query": queries[0], "top_k": top_k}
        if config.kind == "sqlite":  # in FTS5's language, quoted words have no other meaning
            values["query"] = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", queries[0])) or '""'
        if vectors:
            values["vector"] = str((await vectors.encode(queries))[0])
        rows = await Worker(str(config.kind), RetrievalError).call(ask, values)
        return [ranking(((str(id_), {"title": title, "text": text}, s) for id_, title, text, s in rows), plain)]

    async def close() -> None:
        while idle:
            idle.pop().close()

    return LibraryBackend(config, find, known=vectors and vectors.identity, close=close, concurrency=4, **errors)


def _existing(config: RetrievalConfig) -> Path:
    path = named_path(needed(config.backend.path, config, _PATH))
    if not path.exists():
        raise ConfigError(f"retriever {config.kind}: {path} does not exist")
    return path
