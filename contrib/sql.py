"""Passages in a database: Postgres with pgvector, or a full-text table of SQLite (FTS5).

    reasonrag build-tree --retriever python:contrib.sql:open_sqlite \
        --set retrieval.backend.path=passages.db --set retrieval.backend.collection=passages ...
    reasonrag build-tree --retriever python:contrib.sql:open_pgvector --encoder intfloat/e5-base-v2 \
        --set retrieval.backend.path=postgresql://reader@127.0.0.1/wiki --set retrieval.backend.collection=passages ...

Postgres needs `psycopg[binary]`; its password comes from PGPASSWORD or ~/.pgpass. Options: path, collection, id, title,
text, vector (the column of the vectors), or `sql`: a statement that returns id, title, text and score, best first. It
has the values %(query)s, %(vector)s and %(top_k)s in Postgres, :query and :top_k in SQLite.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contrib.searching import QueryRetriever, needed, passages_of, query_vectors
from reasonrag import Config, ConfigError, Passage, Question

_NEAREST = (
    "SELECT {id}, {title}, {text}, 1 - ({vector} <=> %(vector)s::vector) FROM {collection} "
    "ORDER BY {vector} <=> %(vector)s::vector LIMIT %(top_k)s"
)
_BM25 = (
    "SELECT {id}, {title}, {text}, -bm25({collection}) FROM {collection} WHERE {collection} MATCH :query "
    "ORDER BY bm25({collection}), rowid LIMIT :top_k"
)


def open_pgvector(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open a table of Postgres; its vectors are compared by cosine."""
    import psycopg

    url = needed(config, "path")
    statement = _statement(config, _NEAREST, {"id": "id", "vector": "embedding"})
    encode = query_vectors(config) if "%(vector)s" in statement else None

    async def values(query: str, top_k: int) -> dict[str, Any]:
        vector = str(await encode(query)) if encode else None
        return {"query": query, "top_k": top_k, "vector": vector}

    def connect() -> Any:
        return psycopg.connect(url, autocommit=True, connect_timeout=10)

    return _retriever("pgvector", config, statement, connect, values, (OSError, psycopg.OperationalError))


def open_sqlite(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open a table; rows with any word of a query are ranked by BM25."""
    path = Path(needed(config, "path")).expanduser()
    if not path.exists():
        raise ConfigError(f"retriever sqlite: {path} does not exist")
    statement = _statement(config, _BM25, {"id": "rowid"})

    async def values(query: str, top_k: int) -> dict[str, Any]:
        # Quoted words have no other meaning in the query language of FTS5.
        words = [f'"{word}"' for word in re.findall(r"\w+", query)]
        return {"query": " OR ".join(words) or '""', "top_k": top_k}

    def connect() -> Any:
        return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)

    return _retriever("sqlite", config, statement, connect, values, (OSError, sqlite3.OperationalError))


def _statement(config: Config, template: str, defaults: dict[str, str]) -> str:
    options = config.retrieval.backend
    if options.get("sql"):
        return str(options["sql"])
    collection = needed(config, "collection")
    names = {"title": "title", "text": "text"} | defaults | options | {"collection": collection}
    return template.format(**names)


def _retriever(
    name: str,
    config: Config,
    statement: str,
    connect: Callable[[], Any],
    values: Callable[[str, int], Any],
    transient: tuple[type[Exception], ...],
) -> QueryRetriever:
    """Run the statement in a thread, with a connection for each search in flight."""
    idle: list[Any] = []
    plain = config.model_copy(update={"retrieval": config.retrieval.model_copy(update={"backend": {}})})

    def run(bound: dict[str, Any]) -> list[Any]:
        connection = idle.pop() if idle else connect()
        try:
            rows: list[Any] = connection.execute(statement, bound).fetchall()
        except BaseException:
            connection.close()
            raise
        idle.append(connection)
        return rows

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        rows = await asyncio.to_thread(run, await values(query, top_k))
        return passages_of([(id_, {"title": title, "text": text}, score) for id_, title, text, score in rows], plain)

    async def close() -> None:
        while idle:
            idle.pop().close()

    return QueryRetriever(name, config, find, close=close, transient=transient, concurrency=4)
