"""The client of a retrieval server over HTTP, in Search-R1's protocol: `POST /retrieve`."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, Retries, Unavailable, backoff, bearer_header, check_url
from reasonrag.core.types import Passage
from reasonrag.retrieval.backends.base import HttpBackend, Ranking, found_passage
from reasonrag.retrieval.corpus import passage_contents

if TYPE_CHECKING:
    from yarl import URL

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_AVOIDED_S = 10.0  # a server is avoided for this long after a failure, while others answer


@dataclass(slots=True, eq=False)
class _Server:
    url: URL
    in_flight: int = 0
    failing_since: float | None = None  # without an answer to any request
    avoid_until: float = 0.0  # it failed, so others are tried first
    closed_until: float = 0.0  # from its Retry-After header


class RemoteRetriever(HttpBackend):
    """Asks several equal servers: always the one with the fewest requests in flight, another one if it fails.

    It waits for a server that restarts. It belongs to the event loop of its first search until `aclose`.
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
            max_retries: further attempts after a failure of a server that is up. Failures to connect, and replies
                with Retry-After, do not count; they are retried until the deadline.
            deadline_s: seconds for a request with all its retries and waits.
            concurrency: most requests in flight.
            max_queries: most queries of a request; more are sent in several requests at the same time.
            identity: names corpus and index in fingerprints. Change it when the servers change theirs, because a URL
                says nothing about what answers there.
            token_env: environment variable whose value, if it is set, is sent as a bearer token.

        Raises:
            ConfigError: there is no URL, one is not http(s), or the token cannot be sent in a header.
        """
        self._servers = [_Server(_endpoint(url)) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._servers:
            raise ConfigError("a remote retriever needs the URL of at least one server")
        super().__init__(
            f"the retrieval server{'s' if len(self._servers) > 1 else ''}",
            hashlib.sha256(f"remote:{identity}".encode()).hexdigest()[:16],
            timeout_s=timeout_s,
            max_retries=max_retries,
            deadline_s=deadline_s,
            concurrency=concurrency,
            max_queries=max_queries,
        )
        self.places = len(self._servers)
        self._headers = bearer_header(os.environ.get(token_env), f"the token in {token_env}")

    def _retries(self) -> Retries:
        return Retries(deadline_s=self._deadline_s, max_retries=self._max_retries, wait_s=self._wait_s)

    def _next_server(self) -> _Server:
        """Pick the working server with the fewest requests, in turn; if none works, the first that opens again."""
        now = time.monotonic()
        # `min` takes the first of equal servers, so the chosen one moves to the end.
        chosen = min(self._servers, key=lambda s: (max(s.closed_until - now, 0), s.avoid_until > now, s.in_flight))
        self._servers.remove(chosen)
        self._servers.append(chosen)
        return chosen

    def _wait_s(self, failures: int) -> float:
        """Return 0 if a server is left that works, else about as long as none has, and what the servers asked for.

        The failures of this request do not matter: a server that answers others may have failed it by chance.
        """
        now = time.monotonic()
        if any(max(server.avoid_until, server.closed_until) <= now for server in self._servers):
            return 0.0
        failing_s = now - max(server.failing_since or now for server in self._servers)
        first_open = min(server.closed_until for server in self._servers)
        return max(backoff(1, max(failing_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S), first_open - now)

    async def _attempt(self, queries: list[str], top_k: int, timeout_s: float) -> list[Ranking]:
        server = self._next_server()
        server.in_flight += 1
        try:
            payload = {"queries": queries, "topk": top_k, "return_scores": True}
            rankings = _rankings(await self._send(server.url, timeout_s, len(queries) * top_k, json=payload))
        except Unavailable as failure:
            now = time.monotonic()
            server.failing_since = server.failing_since or now
            server.avoid_until, server.closed_until = now + _AVOIDED_S, now + (failure.retry_after_s or 0.0)
            raise
        finally:
            server.in_flight -= 1
        server.failing_since, server.avoid_until, server.closed_until = None, 0.0, 0.0
        return rankings


def _endpoint(url: str) -> URL:
    from yarl import URL

    # A password in the address is sent as HTTP's basic authentication.
    check_url(url, example="http://host:8000", allow_password=True)
    parsed = URL(url)
    return parsed.with_path("/retrieve") if parsed.path in ("", "/") else parsed


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
