"""Web search through Serper, FlashRAG's server, or any other API that speaks JSON (Tavily, Elasticsearch, ...).

    SERPER_API_KEY=... reasonrag build-tree --retriever python:contrib.web:open_serper ...
    reasonrag build-tree --retriever python:contrib.web:open_api --config api.yaml ...

Options of `open_api`: url, request (JSON in which "{query}" and "{top_k}" stand for the values), results (the path of
the list in a reply, "." if the reply is the list), id, title, text, score, key_env, key_header. The journal of a run
keeps what each query found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import aiohttp

from contrib.searching import QueryRetriever, field, needed, passages_of
from reasonrag import Config, ConfigError, Passage, Question, RetrievalError
from reasonrag.core.calls import bearer_header

_SERPER = {
    "url": "https://google.serper.dev/search",
    "request": {"q": "{query}", "num": "{top_k}"},
    "results": "organic",
    "id": "link",
    "text": "snippet",
    "key_env": "SERPER_API_KEY",
    "key_header": "X-API-KEY: {key}",
}
_API = {"request": {"query": "{query}", "top_k": "{top_k}"}}
_FLASHRAG = {"request": {"query": "{query}", "top_n": "{top_k}"}, "results": "."}
_MOST_BYTES = 16 << 20


def open_serper(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open Google search through Serper."""
    return _open("serper", config, _SERPER)


def open_flashrag(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open the `/search` of FlashRAG's retriever server, whose address is `retrieval.backend.url`."""
    return _open("flashrag", config, _FLASHRAG)


def open_api(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open an API that the options describe."""
    return _open("api", config, _API)


def _open(name: str, config: Config, defaults: dict[str, Any]) -> QueryRetriever:
    options = {"results": "results", "id": "id", "score": "score"} | defaults | config.retrieval.backend
    config = config.model_copy(update={"retrieval": config.retrieval.model_copy(update={"backend": options})})
    url, headers = needed(config, "url"), _key(options)
    sessions: list[aiohttp.ClientSession] = []

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        if not sessions:
            sessions.append(aiohttp.ClientSession(headers=headers))
        request = _filled(options["request"], {"{query}": query, "{top_k}": top_k})
        async with sessions[0].post(url, json=request, allow_redirects=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise RetrievalError(f"{name}: the reply is longer than {_MOST_BYTES} bytes", cause="unreadable")
            if response.status == 429 or response.status >= 500:
                raise ConnectionError(f"HTTP {response.status}")
            if response.status != 200:
                quoted = body[:200].decode(errors="replace")
                raise RetrievalError(f"{name} refuses: HTTP {response.status}", quoting=quoted, cause="refused")
        try:
            found = field(json.loads(body), options["results"])
        except (ValueError, RecursionError) as error:
            raise RetrievalError(f"{name}: the reply is not JSON", cause="unreadable") from error
        if not isinstance(found, list):
            raise RetrievalError(f"{name}: the reply has no list at {options['results']!r}", cause="unreadable")
        triples = [(field(one, options["id"]), one, field(one, options["score"])) for one in found]
        return passages_of(triples, config)

    async def close() -> None:
        while sessions:
            await sessions.pop().close()

    return QueryRetriever(name, config, find, close=close, transient=(OSError, aiohttp.ClientError), concurrency=16)


def _key(options: dict[str, Any]) -> dict[str, str]:
    """Return the header with the API key; the option names an environment variable and never the key itself."""
    variable = options.get("key_env")
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(f"the search engine needs an API key; put it into the environment variable {variable}")
    bearer_header(os.environ[variable], f"the API key in {variable}")  # refuses what no header may hold
    name, _, value = options.get("key_header", "Authorization: Bearer {key}").partition(": ")
    return {name: value.replace("{key}", os.environ[variable])}


def _filled(template: Any, values: dict[str, Any]) -> Any:
    """Return JSON with values in place of their names.

    >>> _filled({"q": "{query}", "n": ["{top_k}"]}, {"{query}": "Jaws", "{top_k}": 3})
    {'q': 'Jaws', 'n': [3]}
    """
    if isinstance(template, dict):
        return {key: _filled(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, values) for value in template]
    return values.get(template, template) if isinstance(template, str) else template
