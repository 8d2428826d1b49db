"""Between requests and the index: limits, a bounded queue, batches for the single search thread, and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import structlog
from pydantic import BaseModel, Field

from reasonrag.core.errors import BackendError
from reasonrag.core.serving import ListenSettings, Refusal
from reasonrag.core.settings import setting
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever, MemoryStore, Ranking

log = structlog.get_logger()

_PROBE = "Who wrote the first encyclopedia?"
_RETRY_AFTER_S = "1"
# One batch is searched while the next one is ready, so the search thread never waits for replies to be written.
_BATCHES_IN_WORK = 2
_PREFIX = "reasonrag_retrieval"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServeSettings(ListenSettings):
    """Settings of `serve`. Only `max_query_chars` can change a ranking.

    Limits hold for one request, unless they say otherwise.
    """

    top_k: int = setting(3, "passages per search. A request may ask for another number", "--top-k", ge=1)
    max_top_k: int = setting(1000, "maximum passages per query", ge=1)
    max_passages: int = setting(100_000, "maximum passages of a request: queries times passages per query", ge=1)
    max_queries: int = setting(4096, "maximum queries of a request", ge=1)
    max_query_chars: int = setting(4096, "characters of a query; longer queries are cut", ge=1)
    max_queue: int = setting(16384, "maximum unanswered queries of all requests", ge=1)
    window_ms: float = setting(
        0.0, "milliseconds that a query waits for others; those that arrive during a search go together anyway", ge=0
    )
    max_batch: int = setting(256, "maximum queries that are searched together", ge=1)
    cached_rankings: int = setting(0, "rankings kept in memory for repeated queries", ge=0)
    health_timeout_s: float = setting(10.0, "timeout in seconds of the query behind /health", gt=0)


class RetrieveRequest(BaseModel):
    """The body of Search-R1's `POST /retrieve`. If `topk` is absent, null or 0, the server's default counts."""

    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None
    return_scores: bool = False


class Metrics:
    """Prometheus metrics of one server, in a registry that no other server of the process shares."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        self.requests = Counter(f"{_PREFIX}_requests", "Requests to /retrieve", ["status"], registry=registry)
        self.queries = Counter(f"{_PREFIX}_queries", "Queries of admitted requests", registry=registry)
        self.cut = Counter(f"{_PREFIX}_queries_cut", "Queries over the limit of characters", registry=registry)
        self.in_flight = Gauge(f"{_PREFIX}_requests_in_flight", "Requests to /retrieve in flight", registry=registry)
        self.queue = Gauge(f"{_PREFIX}_queue", "Queries not answered yet", registry=registry)
        self.batch = Histogram(
            f"{_PREFIX}_batch_queries", "Queries searched together", buckets=_BATCHES, registry=registry
        )
        self.seconds = Histogram(
            f"{_PREFIX}_search_seconds", "Seconds from a batch to its rankings", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class MeasuredRetriever:
    """Measures the size of each batch that a retriever searches, and its seconds."""

    def __init__(self, inner: Retriever, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics
        self.fingerprint = inner.fingerprint

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        self._metrics.batch.observe(len(queries))
        with self._metrics.seconds.time():
            return await self._inner.search(queries, top_k)

    async def aclose(self) -> None:
        await self._inner.aclose()


class RetrievalService:
    """Answers requests from one retriever. Belongs to one event loop."""

    def __init__(self, retriever: Retriever, settings: ServeSettings) -> None:
        self.metrics = Metrics()
        self._draining = False
        self._settings = settings
        self._measured = MeasuredRetriever(retriever, self.metrics)
        self._batched = BatchedRetriever(
            self._measured,
            window_s=settings.window_ms / 1000,
            max_batch=settings.max_batch,
            max_lookups=_BATCHES_IN_WORK,
            store=MemoryStore(settings.cached_rankings),
        )
        self._unanswered = 0
        self.metrics.queue.set_function(lambda: self._unanswered)
        self._probing: asyncio.Task[list[Ranking]] | None = None

    async def retrieve(self, request: RetrieveRequest) -> list[Ranking]:
        """Return `[len(request.queries)]` rankings.

        Raises:
            Refusal: the request is over a limit (413, 422), the queue is full or the index does not answer (503).
        """
        top_k = self._check(request)
        with self._admitted(len(request.queries)):
            try:
                return await self._batched.search(self._cut(request.queries), top_k)
            except BackendError as error:
                log.warning("search failed", cause=error.cause)
                raise Refusal(503, f"the index does not answer ({error.cause})", Retry_After=_RETRY_AFTER_S) from None

    async def probe(self) -> None:
        """Search for one query, to see whether the index answers. It waits only for the batches that have begun.

        Raises:
            Refusal: 503, if the server is draining, or the query fails or takes longer than `health_timeout_s`.
        """
        if self._draining:
            raise Refusal(503, "draining: it answers what it has and takes nothing more")
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._measured.search([_PROBE], 1))
        try:
            # Shielded because all callers at the same time share one query.
            await asyncio.wait_for(asyncio.shield(self._probing), self._settings.health_timeout_s)
        except TimeoutError:
            raise Refusal(503, f"no answer to a query in {self._settings.health_timeout_s:g} s") from None
        except Exception as error:
            cause = error.cause if isinstance(error, BackendError) else type(error).__name__
            raise Refusal(503, f"a query fails ({cause})") from None

    def drain(self) -> None:
        """Report from now on that the server is about to end."""
        self._draining = True

    async def aclose(self) -> None:
        await self._batched.aclose()

    def _check(self, request: RetrieveRequest) -> int:
        """Check a request against the limits; return its passages per query."""
        limits, count = self._settings, len(request.queries)
        top_k = request.topk or limits.top_k
        if count > limits.max_queries:
            raise Refusal(413, f"{count} queries; at most {limits.max_queries} a request: send them in parts")
        if top_k > limits.max_top_k:
            raise Refusal(422, f"topk is {top_k}; at most {limits.max_top_k}")
        if count * top_k > limits.max_passages:
            raise Refusal(413, f"{count} queries of topk {top_k}; at most {limits.max_passages} passages a request")
        return top_k

    def _cut(self, queries: Sequence[str]) -> list[str]:
        """Cut long queries: one runaway query of a model must not fail the batch of a training step."""
        limit = self._settings.max_query_chars
        self.metrics.cut.inc(sum(len(query) > limit for query in queries))
        return [query[:limit] for query in queries]

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        # An empty queue admits a request of any size: one that is larger than the queue could never enter otherwise.
        if self._unanswered and self._unanswered + count > self._settings.max_queue:
            raise Refusal(503, "the queue is full", Retry_After=_RETRY_AFTER_S)
        self._unanswered += count
        self.metrics.queries.inc(count)
        try:
            yield
        finally:
            self._unanswered -= count
