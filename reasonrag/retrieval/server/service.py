"""What stands between requests and the index: limits, a queue with an end, and batches for the one search thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from reasonrag.core.errors import BackendError
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever, MemoryStore, Ranking
from reasonrag.retrieval.server.metrics import MeasuredRetriever, Metrics
from reasonrag.retrieval.server.protocol import Refusal, RetrieveRequest
from reasonrag.retrieval.server.settings import ServeSettings

log = structlog.get_logger()

_PROBE = "Who wrote the first encyclopedia?"
_RETRY_AFTER_S = 1
# One batch is searched while the next one lies ready: the search thread never waits for replies to be written.
_BATCHES_IN_WORK = 2


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
        self._probing: asyncio.Task[list[Ranking]] | None = None

    async def retrieve(self, request: RetrieveRequest) -> list[Ranking]:
        """`[len(request.queries)]` rankings.

        Raises:
            Refusal: the request is over a limit (413, 422), the queue is full or the index does not answer (503).
        """
        top_k = self._check(request)
        with self._admitted(len(request.queries)):
            try:
                return await self._batched.search(self._cut(request.queries), top_k)
            except BackendError as error:
                log.warning("search failed", cause=error.cause)
                raise Refusal(503, f"the index does not answer ({error.cause})", retry_after_s=_RETRY_AFTER_S) from None

    async def probe(self) -> None:
        """Ask the index a query, behind no more than the batches that it has in work.

        Raises:
            Refusal: 503, as it is draining, fails, or gives no answer within `health_timeout_s`.
        """
        if self._draining:
            raise Refusal(503, "draining: it answers what it has and takes nothing more")
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._measured.search([_PROBE], 1))
        try:
            # Shielded: all who ask at the same time share it.
            await asyncio.wait_for(asyncio.shield(self._probing), self._settings.health_timeout_s)
        except TimeoutError:
            raise Refusal(503, f"no answer to a query in {self._settings.health_timeout_s:g} s") from None
        except Exception as error:
            cause = error.cause if isinstance(error, BackendError) else type(error).__name__
            raise Refusal(503, f"a query fails ({cause})") from None

    def drain(self) -> None:
        """The server is about to end: say so to whoever asks for its health."""
        self._draining = True

    async def aclose(self) -> None:
        """Give up what is still being searched and close the retriever."""
        await self._batched.aclose()

    def _check(self, request: RetrieveRequest) -> int:
        """The passages per query that are wanted."""
        limits, count, top_k = self._settings, len(request.queries), request.topk or self._settings.top_k
        if count > limits.max_queries:
            raise Refusal(413, f"{count} queries; at most {limits.max_queries} a request: send them in parts")
        if top_k > limits.max_top_k:
            raise Refusal(422, f"topk is {top_k}; at most {limits.max_top_k}")
        if count * top_k > limits.max_passages:
            raise Refusal(413, f"{count} queries of topk {top_k}; at most {limits.max_passages} passages a request")
        return top_k

    def _cut(self, queries: Sequence[str]) -> list[str]:
        """One runaway query of a model must not fail the batch of a training step that it stands in."""
        limit = self._settings.max_query_chars
        self.metrics.cut.inc(sum(len(query) > limit for query in queries))
        return [query[:limit] for query in queries]

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        # A request as large as the queue has to find a place at some time.
        if self._unanswered and self._unanswered + count > self._settings.max_queue:
            raise Refusal(503, "the queue is full", retry_after_s=_RETRY_AFTER_S)
        self._unanswered += count
        self.metrics.queries.inc(count)
        self.metrics.queue.inc(count)
        try:
            yield
        finally:
            self._unanswered -= count
            self.metrics.queue.dec(count)
