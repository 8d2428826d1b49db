"""Passages in a full-text table of SQLite (FTS5), ranked by BM25.

    reasonrag build-tree --retriever python:contrib.sql:open_sqlite \
        --set retrieval.backend.path=passages.db --set retrieval.backend.collection=passages ...

Options: path, collection, id, title, text.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from contrib.searching import QueryRetriever, needed, passages_of
from reasonrag import Config, ConfigError, Passage, Question

_BM25 = (
    "SELECT {id}, {title}, {text}, -bm25({collection}) FROM {collection} WHERE {collection} MATCH ? "
    "ORDER BY bm25({collection}), rowid LIMIT ?"
)


def open_sqlite(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open a table; rows with any word of a query are ranked by BM25."""
    path = Path(needed(config, "path")).expanduser()
    if not path.exists():
        raise ConfigError(f"retriever sqlite: {path} does not exist")
    columns = {"id": "rowid", "title": "title", "text": "text"} | config.retrieval.backend
    statement = _BM25.format(**columns | {"collection": needed(config, "collection")})
    # The columns of the result have these names, whatever those of the table are.
    plain = config.model_copy(update={"retrieval": config.retrieval.model_copy(update={"backend": {}})})

    def search(query: str, top_k: int) -> list[Passage]:
        # Quoted words have no other meaning in the query language of FTS5.
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            matching = connection.execute(statement, (words or '""', top_k)).fetchall()
        documents = []
        for passage_id, title, text, score in matching:
            documents.append((passage_id, {"title": title, "text": text}, score))
        return passages_of(documents, plain)

    try:
        search("", 1)
    except sqlite3.Error as error:  # before a call of a model is paid
        raise ConfigError(
            f"retriever sqlite: {path} cannot be searched; see to path and collection", quoting=error
        ) from None

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        return await asyncio.to_thread(search, query, top_k)

    return QueryRetriever("sqlite", config, find, transient=(OSError, sqlite3.OperationalError), concurrency=4)
