"""The client of a retrieval server over HTTP, in Search-R1's protocol: `POST /retrieve`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, Unavailable, bearer_header, check_url
from reasonrag.core.types import Passage
from reasonrag.retrieval.backends.base import HttpBackend, Ranking, found_passage
from reasonrag.retrieval.corpus import passage_contents


class RemoteRetriever(HttpBackend):
    """Asks several equal servers: always the one with the fewest requests in flight, another one if it fails.

    It waits for a server that restarts: one request at a time finds out whether it is back. It belongs to the event
    loop of its first search until `aclose`.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 8,
        deadline_s: float = 300.0,
        concurrency: int = 64,
        max_queries: int = 256,
        identity: str = "remote",
        token_env: str = TOKEN_ENV,
    ) -> None:
        """Name the servers; nothing is sent before the first search.

        Args:
            urls: addresses of servers with the same corpus and index. `/retrieve` is added to a URL without a path.
            timeout_s: seconds for one attempt.
            max_retries: further attempts after a failure of a server that is there. 429 does not count, nor does 503 of
                a server that works on other requests.
            deadline_s: seconds for a request with its retries at servers that are there; and as many to wait while none
                is, which an outage uses up once (`Addresses`).
            concurrency: most requests in flight at each server.
            max_queries: most queries of a request; more are sent in several requests at the same time.
            identity: names corpus and index in fingerprints. Change it when the servers change theirs, because a URL
                says nothing about what answers there.
            token_env: environment variable whose value, if it is set, is sent as a bearer token.

        Raises:
            ConfigError: there is no URL, one is not http(s), or the token cannot be sent in a header.
        """
        urls = [urls] if isinstance(urls, str) else urls
        for url in urls:
            # A password in the address is sent as HTTP's basic authentication.
            check_url(url, example="http://host:8000", allow_password=True)
        if not urls:
            raise ConfigError("a remote retriever needs the URL of at least one server")
        super().__init__(
            f"the retrieval server{'s' if len(urls) > 1 else ''}",
            hashlib.sha256(f"remote:{identity}".encode()).hexdigest()[:16],
            timeout_s=timeout_s,
            max_retries=max_retries,
            deadline_s=deadline_s,
            concurrency=concurrency,
            max_queries=max_queries,
            urls=urls,
        )
        self._key_env = token_env
        self._headers = bearer_header(os.environ.get(token_env), f"the token in {token_env}")

    async def _attempt(self, url: str, queries: list[str], top_k: int, timeout_s: float) -> list[Ranking]:
        from yarl import URL

        endpoint = URL(url)
        endpoint = endpoint.with_path("/retrieve") if endpoint.path in ("", "/") else endpoint
        payload = {"queries": queries, "topk": top_k, "return_scores": True}
        return _rankings(await self._send(endpoint, timeout_s, len(queries) * top_k, json=payload))


def _rankings(body: bytes) -> list[Ranking]:
    try:
        results = json.loads(body.decode(errors="replace"))["result"]
        return [tuple(_passage(item) for item in result) for result in results]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        # A proxy's HTML page with status 200, or a truncated body: another attempt may succeed.
        raise Unavailable("the reply is not a list of rankings", cause="unreadable") from None


def _passage(item: Mapping[str, Any]) -> Passage:
    """Parse {"document": {...}, "score": x}, or a bare document as servers without scores send it."""
    document = item.get("document", item)
    contents = passage_contents(document)
    if contents is None:
        raise ValueError
    return found_passage(document.get("id"), contents, item.get("score"))
