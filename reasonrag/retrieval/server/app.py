"""The HTTP side of a retrieval server: `POST /retrieve`, `GET /health`, `GET /metrics`."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import structlog

from reasonrag.retrieval.server.protocol import Refusal, RetrieveRequest, reply
from reasonrag.retrieval.server.service import RetrievalService
from reasonrag.retrieval.server.settings import ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

log = structlog.get_logger()

_BODY_TIMEOUT_S = 30.0
_LOOPBACK_NAMES = ["localhost", "127.0.0.1", "[::1]"]


def retrieval_app(service: RetrievalService, settings: ServeSettings) -> FastAPI:
    """Build the ASGI application around a service. The caller closes the service.

    Raises:
        ConfigError: other machines reach the address, and that is not allowed or has no token.
    """
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    token = settings.token()
    app = FastAPI(title="reasonrag retrieval", openapi_url=None)
    endpoints = _Endpoints(service, settings)
    # Plain routes, because FastAPI would read bodies of any size.
    app.add_route("/retrieve", endpoints.retrieve, methods=["POST"])
    app.add_route("/health", endpoints.health, methods=["GET"])
    app.add_route("/metrics", endpoints.metrics, methods=["GET"])
    if token is not None:
        app.add_middleware(_BearerToken, token=token)
    if settings.loopback:
        # A web page may reach this address through a host name that it controls (DNS rebinding).
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK_NAMES, settings.host], www_redirect=False)
    return app


class _Endpoints:
    def __init__(self, service: RetrievalService, settings: ServeSettings) -> None:
        self._service = service
        self._settings = settings

    async def retrieve(self, request: Request) -> Response:
        metrics = self._service.metrics
        with metrics.in_flight.track_inprogress():
            try:
                response = await self._answer(request)
            except Refusal as refusal:
                response = _refused(refusal)
            except asyncio.CancelledError:
                # The drain is over its deadline. The task ends here in any case; the client learns why.
                response = _refused(Refusal(503, "the server stopped before the answer was there", retry_after_s=1))
            except Exception as error:
                # Its message may hold queries.
                log.error("a request failed", error=type(error).__name__)
                response = _refused(Refusal(500, f"internal error ({type(error).__name__})"))
        metrics.requests.labels(response.status_code).inc()
        return response

    async def _answer(self, request: Request) -> Response:
        from starlette.responses import Response

        retrieve_request = RetrieveRequest.read(await _body(request, self._settings.max_body_bytes))
        rankings = await self._service.retrieve(retrieve_request)
        return Response(reply(rankings, scores=retrieve_request.return_scores), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """Answer 200 if a query is answered, else 503 with the cause."""
        from starlette.responses import JSONResponse

        try:
            await self._service.probe()
        except Refusal as refusal:
            return _refused(refusal)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
        from starlette.responses import Response

        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _BearerToken:
    """Middleware that refuses requests without the token; `/health` needs none."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health" and not self._has_token(scope):
            response = _refused(Refusal(401, "this server needs a token, sent as Authorization: Bearer TOKEN"))
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


async def _body(request: Request, limit: int) -> bytes:
    from starlette.requests import ClientDisconnect

    refusal = Refusal(413, f"the body is larger than {limit} bytes: send fewer queries in one request")
    if int(request.headers.get("content-length", 0)) > limit:
        raise refusal
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise refusal
    except TimeoutError:
        raise Refusal(408, f"the body was not there after {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the client left before the end of the body") from None
    return bytes(body)


def _refused(refusal: Refusal) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": str(refusal)}, refusal.status, headers=refusal.headers)
