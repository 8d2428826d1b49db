"""Settings of a retrieval server: limits of requests, queue and batches."""

from __future__ import annotations

from reasonrag.core.serving import ListenSettings
from reasonrag.core.settings import setting


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
