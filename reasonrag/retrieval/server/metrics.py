"""What a retrieval server counts, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Sequence

from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever

_PREFIX = "reasonrag_retrieval"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        self.requests = Counter(f"{_PREFIX}_requests", "Requests to /retrieve", ["status"], registry=registry)
        self.queries = Counter(f"{_PREFIX}_queries", "Queries of admitted requests", registry=registry)
        self.cut = Counter(f"{_PREFIX}_queries_cut", "Queries over the limit of characters", registry=registry)
        self.in_flight = Gauge(f"{_PREFIX}_requests_in_flight", "Requests to /retrieve in work", registry=registry)
        self.queue = Gauge(f"{_PREFIX}_queue", "Queries that are not answered yet", registry=registry)
        self.batch = Histogram(
            f"{_PREFIX}_batch_queries", "Queries searched together", buckets=_BATCHES, registry=registry
        )
        self.seconds = Histogram(
            f"{_PREFIX}_search_seconds", "Seconds from a batch to its rankings", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        """All of them, as `/metrics` shows them."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class MeasuredRetriever:
    """Counts the batches that a retriever searches, and their seconds."""

    def __init__(self, inner: Retriever, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics

    @property
    def fingerprint(self) -> str:
        """That of the inner retriever."""
        return self._inner.fingerprint

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings, as the inner retriever gives them."""
        self._metrics.batch.observe(len(queries))
        began = time.perf_counter()
        try:
            return await self._inner.search(queries, top_k)
        finally:
            self._metrics.seconds.observe(time.perf_counter() - began)

    async def aclose(self) -> None:
        """Close the inner retriever."""
        await self._inner.aclose()
