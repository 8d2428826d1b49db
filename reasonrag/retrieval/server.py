"""Serve a retriever over HTTP, in the protocol of Search-R1's retrieval server: `POST /retrieve`, `GET /health`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

import structlog
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from reasonrag.core.errors import BackendError, RetrievalError
from reasonrag.core.serving import App, ListenSettings, Receive, Refusal, Response, Scope, describe_problems, run_app
from reasonrag.core.settings import setting
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import PROBE, BatchedRetriever, MemoryStore, Retriever

log = structlog.get_logger()

# Limits of a request. A longer query is cut: one runaway
# query of a model must not fail the batch of a training step.
MAX_TOP_K, MAX_PASSAGES, MAX_QUERY_CHARS = 1000, 100_000, 4096

# One batch is searched while the next one is ready, so
# the search thread never waits for replies to be written.
_BATCHES_IN_WORK = 2
_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # json.dumps makes an encoder for each reply


class ServeSettings(ListenSettings):
    """Settings of `index serve`."""

    top_k: int = setting(3, "passages per search. A request may ask for another number", "--top-k", ge=1)
    max_queue: int = setting(16384, "maximum unanswered queries of all requests", ge=1)
    health_timeout_s: float = setting(10.0, "timeout in seconds of the query that /health sends", gt=0)


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


class RetrieveRequest(BaseModel):
    """The body of Search-R1's `POST /retrieve`. If `topk` is absent, null or 0, the server's default counts.

    SkyRL's environment asks one `query`.
    """

    queries: Annotated[list[str], BeforeValidator(_listed), Field(validation_alias=AliasChoices("queries", "query"))]
    topk: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_K)] | None = None
    return_scores: bool = False


def serve(retriever: Retriever, settings: ServeSettings, *, about: str = "") -> int:
    """Serve until SIGTERM or Ctrl-C, then close the retriever; see `run_app`.

    The server listens once a first query was answered.

    Raises:
        ConfigError: see `run_app`.
        RetrievalError: the first query was not answered.
    """
    return run_app(RetrievalApp(retriever, settings), about=about)


class RetrievalApp(App):
    """Answers HTTP requests from one retriever. Queries of requests that arrive together are searched together."""

    def __init__(self, retriever: Retriever, settings: ServeSettings) -> None:
        super().__init__(settings)
        self._retriever = retriever
        self._batched = BatchedRetriever(retriever, window_s=0, max_lookups=_BATCHES_IN_WORK, store=MemoryStore(0))
        self.serving = settings
        self._unanswered = self._in_flight = 0  # queries, and requests to /retrieve
        self._is_draining = False
        self.routes = {
            "/retrieve": ("POST", self._retrieve),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def start(self) -> None:
        try:
            await self._probe()
        except Refusal as refusal:
            raise RetrievalError(f"the index cannot be served: {refusal}", cause="unhealthy") from None

    def drain(self) -> None:
        self._is_draining = True

    async def aclose(self) -> None:
        await self._batched.aclose()

    async def _retrieve(self, scope: Scope, receive: Receive) -> Response:
        request = parsed(await self.body(scope, receive))
        count, top_k = len(request.queries), request.topk or self.serving.top_k
        if count * top_k > MAX_PASSAGES:
            raise Refusal(413, f"{count} queries of topk {top_k}; at most {MAX_PASSAGES} passages a request")
        # An empty queue admits a request of any size: a larger one could never enter otherwise.
        if self._unanswered and self._unanswered + count > self.serving.max_queue:
            raise Refusal(503, "the queue is full")
        self._unanswered += count
        self._in_flight += 1
        try:
            rankings = await self._batched.search([query[:MAX_QUERY_CHARS] for query in request.queries], top_k)
        except BackendError as error:
            log.warning("search failed", cause=error.cause)
            raise Refusal(503, f"the index does not answer ({error.cause})") from None
        finally:
            self._unanswered -= count
            self._in_flight -= 1
        return Response(reply(rankings, scores=request.return_scores))

    async def _health(self, scope: Scope, receive: Receive) -> Response:
        await self._probe()
        return Response(b'{"status":"ok"}')

    async def _metrics(self, scope: Scope, receive: Receive) -> Response:
        """Return two gauges in Prometheus' text format."""
        name = "reasonrag_retrieval"
        gauges = f"{name}_requests_in_flight {self._in_flight}\n{name}_queue {self._unanswered}\n"
        return Response(gauges.encode(), media_type="text/plain; version=0.0.4")

    async def _probe(self) -> None:
        """Search for one query, to see whether the index answers; raise Refusal with 503 and the cause if not."""
        if self._is_draining:
            raise Refusal(503, "draining: requests in flight are answered, new ones are not")
        try:
            await asyncio.wait_for(self._retriever.search([PROBE], 1), self.serving.health_timeout_s)
        except TimeoutError:
            raise Refusal(503, f"no answer to a query in {self.serving.health_timeout_s:g} s") from None
        except Exception as error:
            cause = error.cause if isinstance(error, BackendError) else type(error).__name__
            raise Refusal(503, f"a query fails ({cause})") from None


def parsed(body: bytes) -> RetrieveRequest:
    """Parse a request; raise Refusal with status 422 and the problems, without any value of the request."""
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        hint = 'expected {"queries": ["..."], "topk": 3, "return_scores": true}, or one text as query'
        raise Refusal(422, f"{describe_problems(error)}; {hint}") from None


def reply(rankings: Sequence[Sequence[Passage]], *, scores: bool) -> bytes:
    """Write an answer as Search-R1's server does (`search_r1/search/retrieval_server.py`).

    It is `{"result": [ranking, ...]}`, one ranking per query, best passage first. A passage is
    `{"document": {"id", "contents"}, "score"}` with scores, and the document alone without.
    """

    def written(passage: Passage) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if scores else document

    return _as_json({"result": [list(map(written, ranking)) for ranking in rankings]}).encode(errors="replace")
