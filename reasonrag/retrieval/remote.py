"""The client of a retrieval server over HTTP, in Search-R1's protocol: `POST /retrieve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.http import (
    TOKEN_ENV,
    Retries,
    Unavailable,
    backoff,
    bearer_header,
    check_url,
    is_transient,
    parse_retry_after,
)
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.corpus import passage_contents
from reasonrag.storage.questions import passage_id
from reasonrag.storage.records import text_id

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_AVOIDED_S = 10.0  # a server is avoided for this long after a failure, while others answer
_CHECK_TIMEOUT_S = 10.0
_MOST_BYTES = 256 << 20  # of a reply, decompressed
_MOST_READ_OF_ERRORS = 1 << 16  # far more than is shown, so that no secret is cut before it is recognized


@dataclass(slots=True, eq=False)
class _Server:
    url: URL
    in_flight: int = 0
    avoid_until: float = 0.0  # it failed, so others are tried first
    closed_until: float = 0.0  # from its Retry-After header

    @property
    def name(self) -> str:
        """Host and port for messages, because a URL may contain a password."""
        return f"{self.url.host}:{self.url.port}"


class RemoteRetriever:
    """Asks several equal servers: always the one with the fewest requests in flight, another one if it fails.

    It waits for a server that restarts. It belongs to the event loop of its first search until `aclose`.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 5,
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
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._deadline_s = deadline_s
        # A limit of the connection pool would count the wait for a connection as part of the request's time.
        self._slots = asyncio.Semaphore(concurrency)
        self._max_queries = max_queries
        self.fingerprint = hashlib.sha256(f"remote:{identity}".encode()).hexdigest()[:16]
        self._headers = bearer_header(os.environ.get(token_env), f"the token in {token_env}")
        self._session: aiohttp.ClientSession | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings in the server's order. Empty queries are not sent and find nothing.

        `Passage.score` is 0 if the server does not send scores.

        Raises:
            RetrievalError: no server answered in time, one refused the request, or a reply cannot be matched to the
                queries.
        """
        sent_queries = [valid_unicode(query) for query in queries if query.strip()]
        requests = []
        for start in range(0, len(sent_queries), self._max_queries):
            part = sent_queries[start : start + self._max_queries]
            requests.append(asyncio.ensure_future(self._ask(part, top_k)))
        try:
            replies = await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()
        rankings = (ranking for reply in replies for ranking in reply)
        return [next(rankings)[:top_k] if query.strip() else () for query in queries]

    async def check(self) -> None:
        """Raise if no server answers a query.

        Raises:
            RetrievalError: none of them does.
        """
        failures = []
        for server in self._servers:
            try:
                _rankings(await self._post(server, _payload(["check"], 1), min(self._timeout_s, _CHECK_TIMEOUT_S)), 1)
            except Unavailable as failure:
                failures.append(str(failure))
            else:
                return
        raise RetrievalError(f"no retrieval server answers: {'; '.join(failures)}", cause="connection")

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Send a request to one server after another, with waits, until an attempt succeeds or no attempt is left."""
        payload = _payload(queries, top_k)
        retries = Retries(deadline_s=self._deadline_s, max_retries=self._max_retries, wait_s=self._wait_s)
        try:
            return await retries.run_async(partial(self._attempt, payload, len(queries), retries))
        except Unavailable as failure:
            raise RetrievalError(
                f"no retrieval server answered in {retries.failures} attempts; last: {failure}", cause=failure.cause
            ) from failure

    def _next_server(self) -> _Server:
        """Pick the working server with the fewest requests, in turn; if none works, the first that opens again."""
        now = time.monotonic()
        # `min` takes the first of equal servers, so the chosen one moves to the end.
        chosen = min(self._servers, key=lambda s: (max(s.closed_until - now, 0), s.avoid_until > now, s.in_flight))
        self._servers.remove(chosen)
        self._servers.append(chosen)
        return chosen

    def _wait_s(self, failures: int) -> float:
        """Return 0 if a server is left that works, else a growing wait, no shorter than the servers asked for."""
        now = time.monotonic()
        if any(max(server.avoid_until, server.closed_until) <= now for server in self._servers):
            return 0.0
        rounds = max(failures // len(self._servers), 1)
        first_open = min(server.closed_until for server in self._servers)
        return max(backoff(rounds, _FIRST_WAIT_S, _LONGEST_WAIT_S), first_open - now)

    async def _attempt(
        self, payload: Mapping[str, Any], query_count: int, retries: Retries
    ) -> list[tuple[Passage, ...]]:
        async with self._slots:
            server = self._next_server()
            server.in_flight += 1
            try:
                reply = await self._post(server, payload, min(self._timeout_s, retries.left_s))
                rankings = _rankings(reply, query_count)
            except Unavailable as failure:
                now = time.monotonic()
                server.avoid_until, server.closed_until = now + _AVOIDED_S, now + (failure.retry_after_s or 0.0)
                raise
            finally:
                server.in_flight -= 1
            server.avoid_until = server.closed_until = 0.0
            return rankings

    async def _post(self, server: _Server, payload: Mapping[str, Any], timeout_s: float) -> bytes:
        import aiohttp

        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0))
            # A redirect is refused below, because it would send queries to a host that was not configured.
            sent = self._open_session().post(server.url, json=payload, timeout=timeout, allow_redirects=False)
            async with sent as response:
                body = await _read(response, server.name)
        except aiohttp.ConnectionTimeoutError:
            raise Unavailable(f"{server.name} cannot be reached", cause="connection", counts=False) from None
        except TimeoutError:
            raise Unavailable(f"{server.name} gave no reply in {timeout_s:.1f} s", cause="timeout") from None
        except aiohttp.ClientError as error:
            what = f"the connection to {server.name} failed ({type(error).__name__})"
            counts = not isinstance(error, aiohttp.ClientConnectorError)
            raise Unavailable(what, cause="connection", counts=counts) from None
        if is_transient(response.status):
            wait_s = parse_retry_after(response.headers.get("Retry-After"))
            what = f"{server.name} answers HTTP {response.status}"
            raise Unavailable(what, cause=f"http_{response.status}", retry_after_s=wait_s, counts=wait_s is None)
        if response.status != 200:
            raise RetrievalError(
                f"{server.name} refuses: HTTP {response.status}",
                quoting=body[:_MOST_READ_OF_ERRORS].decode(errors="replace"),
                cause=f"http_{response.status}",
            )
        return body

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._session


async def _read(response: aiohttp.ClientResponse, server: str) -> bytes:
    """Read the body; raise if it is larger than rankings can be."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > _MOST_BYTES:
            what = f"{server} sends more than {_MOST_BYTES >> 20} MiB in one reply, more than rankings can be"
            raise RetrievalError(what, cause="reply_too_large")
    return bytes(body)


def _payload(queries: list[str], top_k: int) -> dict[str, Any]:
    return {"queries": queries, "topk": top_k, "return_scores": True}


def _endpoint(url: str) -> URL:
    from yarl import URL

    # A password in the address is sent as HTTP's basic authentication.
    check_url(url, example="http://host:8000", allow_password=True)
    parsed = URL(url)
    return parsed.with_path("/retrieve") if parsed.path in ("", "/") else parsed


def _rankings(body: bytes, count: int) -> list[tuple[Passage, ...]]:
    try:
        results = json.loads(body.decode(errors="replace"))["result"]
        rankings = [tuple(_passage(item) for item in result) for result in results]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        # A proxy's HTML page with status 200, or a truncated body: another attempt may succeed.
        raise Unavailable("the reply is not a list of rankings", cause="unreadable") from None
    if len(rankings) != count:
        raise RetrievalError(
            f"{count} queries were asked and {len(rankings)} rankings came back: which belongs to which is unknown",
            cause="misaligned",
        )
    return rankings


def _passage(item: Mapping[str, Any]) -> Passage:
    """Parse {"document": {...}, "score": x}, or a bare document as servers without scores send it."""
    document = item.get("document", item)
    contents = passage_contents(document)
    if contents is None:
        raise ValueError
    score = item.get("score")
    if not isinstance(score, int | float) or not math.isfinite(score):
        score = 0.0
    return Passage(text_id(document.get("id")) or passage_id(contents), contents, float(score))
