"""The client of a retrieval server over HTTP, in Search-R1's protocol: `POST /retrieve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import structlog
from yarl import URL

from reasonrag.core import calls
from reasonrag.core.errors import RetrievalError
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage, as_finite
from reasonrag.retrieval.base import PROBE, Ranking
from reasonrag.retrieval.passages import passage_contents
from reasonrag.storage.files import short_hash
from reasonrag.storage.inputs import text_id
from reasonrag.storage.questions import passage_id

log = structlog.get_logger()

_CONCURRENCY = 64  # requests in flight at each server
_CHECK_TIMEOUT_S = 10.0
# Limits of a reply, decompressed: one very long document,
# plus a long one for each passage that was requested.
_MOST_BYTES, _MOST_BYTES_A_PASSAGE = 16 << 20, 64 << 10


class RemoteRetriever:
    """Sends queries to several equal servers: to the one with the fewest requests in flight, another if it fails.

    It waits for a server that restarts: one request at a time finds out whether
    it is back. A retriever belongs to the event loop of its first search until
    `aclose`. The environment variable REASONRAG_TOKEN is sent as a bearer token.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 8,
        deadline_s: float = 300.0,
        identity: str = "remote",
    ) -> None:
        """Name the servers; nothing is sent before the first search.

        Args:
            urls: addresses of one or more servers with the same corpus and
                index. `/retrieve` is added to a URL without a path.
            timeout_s: seconds for one attempt.
            max_retries: further attempts after a failure of a server that is up. 429 does not count, nor
                does 503 of a server that works on other requests.
            deadline_s: seconds for a request with its retries at servers that are up; and as many to wait
                while all are down, which an outage uses up once (`Addresses`).
            identity: names corpus and index in fingerprints. Change it when the servers change theirs,
                because a URL does not identify their passages.

        Raises:
            ConfigError: a URL is not http(s), or the token cannot be sent in a header.
        """
        urls = [urls] if isinstance(urls, str) else urls
        for url in urls:
            # A password in the address is sent as HTTP's basic authentication.
            calls.check_url(url, example="http://host:8000", allow_password=True)
        self.fingerprint = hashlib.sha256(f"remote:{identity}".encode()).hexdigest()[:16]
        self.name = f"the retrieval server{'s' if len(urls) > 1 else ''}"
        self._timeout_s = timeout_s
        self._addresses = calls.Addresses(
            urls,
            _CONCURRENCY,
            name=self.name,
            error=RetrievalError,
            deadline_s=deadline_s,
            max_retries=max_retries,
            patience_s=deadline_s,
        )
        self.slots = self._addresses.slots
        self._headers = calls.bearer_header(os.environ.get(calls.TOKEN_ENV), f"the token in {calls.TOKEN_ENV}")
        self._session: aiohttp.ClientSession | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return `[len(queries)]` rankings in the server's order. Empty queries are not sent and find nothing.

        `Passage.score` is 0 if the server sends none.

        Raises:
            RetrievalError: no answer in time, the request was refused,
                or the reply cannot be matched to the queries.
        """
        if not (sent_queries := [valid_unicode(query) for query in queries if query.strip()]):
            return [() for _ in queries]
        rankings = iter(await self._addresses.ask(partial(self._request, sent_queries, top_k)))
        return [next(rankings)[:top_k] if query.strip() else () for query in queries]

    async def check(self) -> str:
        """Ask every server the same question; return a checksum of what the first that answers finds.

        Raises:
            RetrievalError: no server answers.
        """
        asked = (self._request([PROBE], 3, None, address.url, _CHECK_TIMEOUT_S) for address in self._addresses.all)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, calls.Unavailable):
                raise answer
        rankings = (answer[0] for answer in answers if isinstance(answer, list))
        found = [short_hash([passage.contents for passage in ranking]) for ranking in rankings]
        if not found:
            problem = f"no answer from {self.name}: {'; '.join(map(str, answers))}; start it, or correct its address"
            raise RetrievalError(problem, cause="unreachable")
        if len(set(found)) > 1:
            log.warning("the retrieval servers find different passages for one query: is their corpus the same?")
        return found[0]

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(self, queries: list[str], top_k: int, _: object, url: str, left_s: float) -> list[Ranking]:
        """Return the rankings of one request; raise Unavailable if another attempt may succeed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        endpoint = URL(url)
        endpoint = endpoint.with_path("/retrieve") if endpoint.path in ("", "/") else endpoint
        most_bytes = _MOST_BYTES + len(queries) * top_k * _MOST_BYTES_A_PASSAGE
        limits = min(self._timeout_s, left_s), most_bytes, "connection"
        payload = {"queries": queries, "topk": top_k, "return_scores": True}
        reply, body = await calls.exchange(self._session, "POST", str(endpoint), *limits, json=payload)
        status, server = reply.status, f"{endpoint.host}:{endpoint.port}"  # a URL may contain a password
        cause = f"http_{status}"
        if calls.is_transient(status):
            wait_s = calls.parse_retry_after(reply.headers.get("Retry-After"))
            raise calls.Unavailable(f"{server} answers HTTP {status}", cause=cause, status=status, retry_after_s=wait_s)
        if status != 200:
            key = calls.about_key(status, bool(self._headers), calls.TOKEN_ENV)
            quoted = body.decode(errors="replace")
            raise RetrievalError(f"{server} refuses: HTTP {status}{key}", quoting=quoted, cause=cause)
        rankings = _rankings(body)
        if len(rankings) != len(queries):  # then it is unknown which ranking belongs to which query
            problem = f"{server} got {len(queries)} queries and gave {len(rankings)} rankings"
            raise RetrievalError(problem, cause="misaligned")
        return rankings


def _rankings(body: bytes) -> list[Ranking]:
    try:
        results = json.loads(body.decode())["result"]
        if not all(isinstance(result, list) for result in [results, *results]):
            raise TypeError
        return [tuple(filter(None, map(_passage, result))) for result in results]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        # A proxy's HTML page with status 200, or a truncated body: another attempt may succeed.
        raise calls.Unavailable("the reply is not a list of rankings in UTF-8", cause="unreadable") from None


def _passage(item: Mapping[str, Any]) -> Passage | None:
    """Parse {"document": {...}, "score": x}, or a bare document as servers without scores send it; None if it is empty.

    Raises:
        ValueError: it has no column for a text.
    """
    document = item.get("document", item)
    if (contents := passage_contents(document)) is None:
        if not {"contents", "text"} & document.keys():
            raise ValueError
        return None
    return Passage(text_id(document.get("id")) or passage_id(contents), contents, as_finite(item.get("score")) or 0.0)
