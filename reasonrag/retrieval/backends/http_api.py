"""Search over JSON and HTTP: Elasticsearch, OpenSearch, web search (Serper, Tavily), or any API that is described."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from reasonrag.core.config import BackendConfig, RetrievalConfig
from reasonrag.core.documents import named_path
from reasonrag.core.http import Unavailable, check_url
from reasonrag.retrieval.backends.base import (
    HttpBackend,
    Ranking,
    documents,
    fill,
    key_header,
    known_as,
    needed,
    query_encoder,
    ranking,
)
from reasonrag.retrieval.batched import JournalStore, without_secrets
from reasonrag.storage.journal import Journal

_MATCH = {"multi_match": {"query": "{query}", "fields": ["{title}^2", "{text}"]}}
_LUCENE = {
    **{"request": {"query": _MATCH, "size": "{top_k}"}, "results": "hits.hits"},
    **{"document": "_source", "id": "_id", "score": "_score", "key_header": "Authorization: {key}"},
}
APIS: dict[str, dict[str, Any]] = {
    "elasticsearch": _LUCENE,
    "opensearch": _LUCENE,
    "serper": {
        **{"request": {"q": "{query}", "num": "{top_k}"}, "results": "organic", "id": "link", "text": "snippet"},
        **{"key_env": "SERPER_API_KEY", "key_header": "X-API-KEY: {key}"},
    },
    "tavily": {
        **{"request": {"query": "{query}", "max_results": "{top_k}"}, "results": "results", "id": "url"},
        **{"text": "content", "key_env": "TAVILY_API_KEY"},
    },
    "api": {"request": {"query": "{query}", "top_k": "{top_k}"}, "results": "results"},
}
"""What is known of an API. A value in `retrieval.backend` replaces the one here."""
_WEB = {"serper": ["https://google.serper.dev/search"], "tavily": ["https://api.tavily.com/search"]}


class ApiRetriever(HttpBackend):
    """Sends each query in a request of its own; keeps on disk, for all runs, what was paid for."""

    def __init__(self, config: RetrievalConfig) -> None:
        """Take address, request and key; nothing is sent before the first search.

        Raises:
            ConfigError: there is no address, index or key, or the encoder that the request needs cannot be opened.
        """
        from yarl import URL

        kind, known = str(config.kind), {"id": "id", "score": "score"}
        given = {name: value for name, value in config.backend if value}
        self._names = names = BackendConfig(**(known | APIS[kind] | given))
        (url, *_) = needed(config.url or _WEB.get(kind), config, "retrieval.url")
        check_url(url, example="https://search.example.org/v1" if kind == "api" else "http://127.0.0.1:9200")
        self._url = URL(url)
        if APIS[kind] is _LUCENE:
            index = needed(names.collection, config, "retrieval.backend.collection, the name of an index")
            self._url = self._url / index / "_search"
        self._vectors = query_encoder(config) if "{vector}" in json.dumps(names.request) else None
        encoder = self._vectors.identity if self._vectors else None
        super().__init__(kind, known_as(config, encoder), timeout_s=config.timeout_s)
        self._headers, self._key_env = key_header(names), names.key_env or self._key_env
        self._run: Journal | None = None
        self._kept: Journal | None = None
        self._is_paid, self._cache = kind in _WEB or bool(names.price), named_path(config.cache)

    def keep_in(self, journal: Journal) -> None:
        """Count what is paid for in a run's journal, as calls of the kind `paid_search`."""
        self._run = journal

    async def aclose(self) -> None:
        await super().aclose()
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    async def _attempt(self, url: str, queries: list[str], top_k: int, timeout_s: float) -> list[Ranking]:
        (query,) = queries
        if not self._is_paid:
            return [await self._found(query, top_k, timeout_s)]
        if self._kept is None:  # not before: a journal is of the thread that opens it
            self._cache.mkdir(parents=True, exist_ok=True)
            self._kept = Journal(self._cache / "searches.sqlite")
        store = JournalStore(self._kept, self.fingerprint)
        kept = store.get(query, top_k)
        if kept is None:
            if self._run is not None:
                self._run.admit()
            kept = tuple(map(without_secrets, await self._found(query, top_k, timeout_s)))
            if self._run is not None:
                await self._run.put_calls("paid_search", {uuid4().hex: None})
            await store.put({query: kept}, top_k)
        return [kept]

    async def _found(self, query: str, top_k: int, timeout_s: float) -> Ranking:
        names = self._names
        values: dict[str, Any] = {"query": query, "top_k": top_k}
        values |= {"title": names.title or "title", "text": names.text or "text"}
        if self._vectors:
            (values["vector"],) = await self._vectors.encode([query])
        asked = fill(names.request, values)
        sent = {"json": asked} if names.method == "POST" else {"params": {n: str(v) for n, v in asked.items()}}
        body = await self._send(self._url, timeout_s, top_k, method=names.method, **sent)
        try:
            reply = json.loads(body.decode(errors="replace"))
        except (ValueError, RecursionError):
            # A proxy's HTML page with status 200, or a truncated body: another attempt may succeed.
            raise Unavailable("the reply is not JSON", cause="unreadable") from None
        return ranking(documents(reply, names), names)[:top_k]
