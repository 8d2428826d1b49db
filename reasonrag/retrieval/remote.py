"""A retrieval server over HTTP, in the protocol that Search-R1 made common: `POST /retrieve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reasonrag.errors import ConfigError, RetrievalError
from reasonrag.questions import passage_id, quoted, text_id
from reasonrag.retrieval.corpus import passage_contents
from reasonrag.text import valid_unicode
from reasonrag.types import Passage

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0


class _Retry(Exception):
    """One attempt failed in a way that another may not."""

    def __init__(self, what: str, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.cause = cause
        self.wait_s = wait_s


_CHECK_TIMEOUT_S = 10.0


class RemoteRetriever:
    """Asks one of several equal servers; another one is tried when it fails.

    Belongs to the event loop of its first search until `aclose`.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 5,
        deadline_s: float = 300.0,
        concurrency: int = 64,
        identity: str = "remote",
    ) -> None:
        """Name the servers; nothing is sent before the first search.

        Args:
            urls: of servers with the same corpus and index. `/retrieve` is added where a URL has no path.
            timeout_s: of one request.
            max_retries: after the first attempt; each goes to the next server.
            deadline_s: of one search with all its retries and waits.
            concurrency: requests in flight at most.
            identity: names corpus and index in fingerprints. Change it when the servers get others: nothing else can
                tell, as the same server may move and another corpus may answer under the same URL.

        Raises:
            ConfigError: no URL, or one that is not http(s).
        """
        self._urls = [_endpoint(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls:
            raise ConfigError("a remote retriever needs the URL of at least one server")
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._deadline_s = deadline_s
        # A limit of the connection pool would count the wait for a connection as part of the request's time.
        self._slots = asyncio.Semaphore(concurrency)
        self._identity = identity
        self._server = 0  # the one that answered last, or the next to try
        self._session: aiohttp.ClientSession | None = None

    @property
    def fingerprint(self) -> str:
        """16 hex digits over `identity`."""
        return hashlib.sha256(f"remote:{self._identity}".encode()).hexdigest()[:16]

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings in the server's order. Empty queries are not sent and find nothing.

        `Passage.score` is 0 where the server does not say it.

        Raises:
            RetrievalError: no server answered in time, one refused the request, or a reply cannot be matched to the
                queries.
        """
        asked = [valid_unicode(query) for query in queries if query.strip()]
        if not asked:
            return [() for _ in queries]
        reply = await self._ask(_payload(asked, top_k), len(asked))
        rankings = iter(reply)
        return [next(rankings)[:top_k] if query.strip() else () for query in queries]

    async def check(self) -> None:
        """Whether one of the servers answers a query.

        Raises:
            RetrievalError: none does.
        """
        failures = []
        for url in self._urls:
            try:
                _rankings(await self._post(url, _payload(["check"], 1), min(self._timeout_s, _CHECK_TIMEOUT_S)), 1)
            except _Retry as failure:
                failures.append(str(failure))
            else:
                return
        raise RetrievalError(f"no retrieval server answers: {'; '.join(failures)}", cause="connection")

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, payload: Mapping[str, Any], count: int) -> list[tuple[Passage, ...]]:
        """Try, wait, try the next server, until an attempt succeeds or retries or time are used up."""
        give_up_at = time.monotonic() + self._deadline_s
        for attempt in range(self._max_retries + 1):
            server = self._server
            left_s = give_up_at - time.monotonic()
            try:
                return _rankings(await self._post(self._urls[server], payload, min(self._timeout_s, left_s)), count)
            except _Retry as error:
                failure = error
            # Others may have moved on from the failing server while this request was waiting for it.
            if self._server == server:
                self._server = (server + 1) % len(self._urls)
            wait_s = max(failure.wait_s, self._backoff_s(attempt))
            if attempt == self._max_retries or time.monotonic() + wait_s >= give_up_at:
                break
            await asyncio.sleep(wait_s)
        raise RetrievalError(
            f"no retrieval server answered in {attempt + 1} attempts; last: {failure}", cause=failure.cause
        ) from failure

    def _backoff_s(self, attempt: int) -> float:
        """No wait while there are servers that have not been tried, then doubling, with full jitter."""
        rounds = (attempt + 1) // len(self._urls)
        if not rounds:
            return 0.0
        longest = min(_FIRST_WAIT_S * 2.0 ** min(rounds - 1, 30), _LONGEST_WAIT_S)
        return random.uniform(longest / 2, longest)

    async def _post(self, url: URL, payload: Mapping[str, Any], timeout_s: float) -> bytes:
        import aiohttp

        # A URL may hold a password: messages name host and port alone.
        server = f"{url.host}:{url.port}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0))
            async with self._slots, self._open_session().post(url, json=payload, timeout=timeout) as response:
                body = await response.read()
        except TimeoutError:
            raise _Retry(f"{server} gave no reply in {timeout_s:.1f} s", "timeout") from None
        except aiohttp.ClientError as error:
            raise _Retry(f"{server} cannot be spoken to ({type(error).__name__})", "connection") from None
        if response.status in _RETRIED:
            wait_s = _retry_after_s(response.headers.get("Retry-After"))
            raise _Retry(f"{server} says HTTP {response.status}", f"http_{response.status}", wait_s)
        if response.status != 200:
            shown = quoted(body[:200].decode(errors="replace"))
            raise RetrievalError(f"{server} refuses: HTTP {response.status} {shown}", cause=f"http_{response.status}")
        return body

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


def _payload(queries: list[str], top_k: int) -> dict[str, Any]:
    return {"queries": queries, "topk": top_k, "return_scores": True}


def _endpoint(url: str) -> URL:
    from yarl import URL

    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        # Not repeated in the message: it may hold a password.
        raise ConfigError("a retrieval server's URL has to look like http://host:port or http://host:port/path")
    return parsed.with_path("/retrieve") if parsed.path in ("", "/") else parsed


def _retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header; 0 where there is none or it is a date."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0


def _rankings(body: bytes, count: int) -> list[tuple[Passage, ...]]:
    try:
        results = json.loads(body.decode(errors="replace"))["result"]
        rankings = [tuple(_passage(item) for item in result) for result in results]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        # A proxy's HTML page under status 200, a body that was cut: worth another attempt.
        raise _Retry("the reply is not a list of rankings", "unreadable") from None
    if len(rankings) != count:
        raise RetrievalError(
            f"{count} queries were asked and {len(rankings)} rankings came back: which belongs to which is unknown",
            cause="misaligned",
        )
    return rankings


def _passage(item: Mapping[str, Any]) -> Passage:
    """A passage from {"document": {...}, "score": x}, or from the document alone as servers without scores send it."""
    document = item.get("document", item)
    contents = passage_contents(document)
    if contents is None:
        raise ValueError
    score = item.get("score")
    if not isinstance(score, int | float) or not math.isfinite(score):
        score = 0.0
    return Passage(text_id(document.get("id")) or passage_id(contents), contents, float(score))
