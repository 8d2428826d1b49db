"""The HTTP side of a retrieval server: `POST /retrieve`, `GET /health`, `GET /metrics`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from reasonrag.core.errors import RetrievalError
from reasonrag.core.serving import App, Receive, Refusal, Response, Scope, describe_problems, run_app
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.server.service import RetrievalService, RetrieveRequest, ServeSettings

_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # json.dumps makes an encoder for each reply


def serve(retriever: Retriever, settings: ServeSettings, *, about: str = "") -> int:
    """Serve until SIGTERM or Ctrl-C, then close the retriever; see `run_app`.

    The server listens once a first query was answered.

    Raises:
        ConfigError: see `run_app`; or a token is missing.
        RetrievalError: the first query was not answered.
    """
    app = RetrievalApp(RetrievalService(retriever, settings), settings)
    return run_app(app, about=about)


class RetrievalApp(App):
    """Answers HTTP requests from a service. The caller closes the service, with `aclose` if not otherwise."""

    def __init__(self, service: RetrievalService, settings: ServeSettings) -> None:
        """Take limits from the settings."""
        super().__init__(settings)
        self._service = service
        self.routes = {
            "/retrieve": ("POST", self._retrieve),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def start(self) -> None:
        try:
            await self._service.probe()
        except Refusal as refusal:
            raise RetrievalError(f"the index cannot be served: {refusal}", cause="unhealthy") from None

    def drain(self) -> None:
        self._service.drain()

    async def aclose(self) -> None:
        await self._service.aclose()

    async def answer(self, scope: Scope, receive: Receive) -> Response:
        response = await super().answer(scope, receive)
        if scope["path"] == "/retrieve":
            self._service.metrics.requests.labels(response.status).inc()
        return response

    async def _retrieve(self, scope: Scope, receive: Receive) -> Response:
        with self._service.metrics.in_flight.track_inprogress():
            request = parsed(await self.body(scope, receive))
            rankings = await self._service.retrieve(request)
            return Response(reply(rankings, scores=request.return_scores))

    async def _health(self, scope: Scope, receive: Receive) -> Response:
        """Answer 200 if a query is answered; `probe` refuses with 503 and the cause otherwise."""
        await self._service.probe()
        return Response(b'{"status":"ok"}')

    async def _metrics(self, scope: Scope, receive: Receive) -> Response:
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def parsed(body: bytes) -> RetrieveRequest:
    """Parse a request; raise Refusal with status 422 and the problems, without any value of the request."""
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        hint = 'expected {"queries": ["..."], "topk": 3, "return_scores": true}'
        raise Refusal(422, f"{describe_problems(error)}; {hint}") from None


def reply(rankings: Sequence[Sequence[Passage]], *, scores: bool) -> bytes:
    """Write an answer as Search-R1's server does (`search_r1/search/retrieval_server.py`).

    It is `{"result": [ranking, ...]}`, one ranking per query, best passage first. A passage is
    `{"document": {"id", "contents"}, "score"}` with scores, and the document alone without.
    """
    result = [[_item(passage, scores) for passage in ranking] for ranking in rankings]
    return _as_json({"result": result}).encode(errors="replace")


def _item(passage: Passage, scores: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scores else document
