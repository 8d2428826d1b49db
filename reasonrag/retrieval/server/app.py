"""The HTTP side of a retrieval server: `POST /retrieve`, `GET /health`, `GET /metrics`.

This is an ASGI application without a framework, because a framework's layers took as long as the search of a query.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from reasonrag.retrieval.server.protocol import Refusal, RetrieveRequest, reply
from reasonrag.retrieval.server.service import RetrievalService
from reasonrag.retrieval.server.settings import ServeSettings

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BODY_TIMEOUT_S = 30.0
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(slots=True)
class _Response:
    body: bytes
    status: int = 200
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


class RetrievalApp:
    """Answers HTTP requests from a service. The caller closes the service."""

    def __init__(self, service: RetrievalService, settings: ServeSettings) -> None:
        """Take limits and access rules from the settings.

        Raises:
            ConfigError: other machines reach the address, and that is not allowed or has no token.
        """
        self._service = service
        self._settings = settings
        token = settings.token()
        self._token = None if token is None else token.encode()
        # A web page may reach a loopback address through a host name that it controls (DNS rebinding).
        self._hosts = {name.encode() for name in (*_LOOPBACK_NAMES, settings.host)} if settings.loopback else None
        self._routes = {
            "/retrieve": ("POST", self._retrieve),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI 3 prescribes."""
        try:
            response = await self._answer(scope, receive)
        except Refusal as refusal:
            response = _refused(refusal)
        head = {"content-type": response.media_type, "content-length": str(len(response.body)), **response.headers}
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Response:
        headers, path = dict(scope["headers"]), scope["path"]
        if self._hosts is not None and re.sub(rb":\d+$", b"", headers.get(b"host", b"").lower()) not in self._hosts:
            raise Refusal(400, "the Host header is not a name of this machine")
        if self._token is not None and path != "/health" and not self._has_token(headers):
            raise Refusal(
                401,
                "this server needs a token, sent as Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if path not in self._routes:
            raise Refusal(404, "there is nothing here; ask POST /retrieve, GET /health or GET /metrics")
        method, endpoint = self._routes[path]
        if scope["method"] not in (method, "HEAD" if method == "GET" else method):
            raise Refusal(405, f"{path} takes {method}", headers={"Allow": method})
        return await endpoint(headers, receive)

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token or b"")

    async def _retrieve(self, headers: dict[bytes, bytes], receive: Receive) -> _Response:
        metrics = self._service.metrics
        with metrics.in_flight.track_inprogress():
            try:
                request = RetrieveRequest.read(await _body(headers, receive, self._settings.max_body_bytes))
                rankings = await self._service.retrieve(request)
                response = _Response(reply(rankings, scores=request.return_scores))
            except Refusal as refusal:
                response = _refused(refusal)
            except asyncio.CancelledError:
                # The drain is over its deadline. The task ends here in any case; the client learns why.
                response = _refused(Refusal(503, "the server stopped before the answer was there", retry_after_s=1))
            except Exception as error:
                # Its message may hold queries.
                log.error("a request failed", error=type(error).__name__)
                response = _refused(Refusal(500, f"internal error ({type(error).__name__})"))
        metrics.requests.labels(response.status).inc()
        return response

    async def _health(self, headers: dict[bytes, bytes], receive: Receive) -> _Response:
        """Answer 200 if a query is answered; `probe` refuses with 503 and the cause otherwise."""
        await self._service.probe()
        return _Response(b'{"status":"ok"}')

    async def _metrics(self, headers: dict[bytes, bytes], receive: Receive) -> _Response:
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

        return _Response(self._service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    refusal = Refusal(413, f"the body is larger than {limit} bytes: send fewer queries in one request")
    if int(headers.get(b"content-length", 0)) > limit:
        raise refusal
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the client left before the end of the body")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limit:
                    raise refusal
    except TimeoutError:
        raise Refusal(408, f"the body was not there after {_BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _refused(refusal: Refusal) -> _Response:
    return _Response(json.dumps({"detail": str(refusal)}).encode(), refusal.status, headers=refusal.headers)
