"""Settings of a retrieval server: its address, and limits of requests, queue and batches."""

from __future__ import annotations

import ipaddress

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, read_token
from reasonrag.core.settings import Section, setting


class ServeSettings(Section):
    """Settings of `serve`. Only `max_query_chars` can change a ranking.

    Limits hold for one request, unless they say otherwise.
    """

    host: str = setting(
        "127.0.0.1", "address to listen on; one that other machines reach needs --allow-remote", "--host"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one", "--port", ge=0, le=65535)
    allow_remote: bool = setting(False, "serve other machines; requires a token", "--allow-remote")
    token_env: str = setting(
        TOKEN_ENV, "environment variable that holds a token; if it is set, clients must send it", "--token-env"
    )
    top_k: int = setting(3, "passages per search. A request may ask for another number", "--top-k", ge=1)
    max_top_k: int = setting(1000, "maximum passages per query", ge=1)
    max_passages: int = setting(100_000, "maximum passages of a request: queries times passages per query", ge=1)
    max_queries: int = setting(4096, "maximum queries of a request", ge=1)
    max_query_chars: int = setting(4096, "characters of a query; longer queries are cut", ge=1)
    max_body_bytes: int = setting(4 << 20, "maximum bytes of a request's body", ge=1)
    max_queue: int = setting(16384, "maximum unanswered queries of all requests", ge=1)
    window_ms: float = setting(
        0.0, "milliseconds that a query waits for others; those that arrive during a search go together anyway", ge=0
    )
    max_batch: int = setting(256, "maximum queries that are searched together", ge=1)
    cached_rankings: int = setting(0, "rankings kept in memory for repeated queries", ge=0)
    health_timeout_s: float = setting(10.0, "timeout in seconds of the query behind /health", gt=0)
    drain_s: int = setting(30, "seconds to finish requests in flight after SIGTERM or Ctrl-C", ge=1)
    access_log: bool = setting(False, "log one line per request on stderr, without its queries")

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self) -> str | None:
        """Return the token that clients have to send; None if they need none.

        Raises:
            ConfigError: other machines reach the address, and that is not allowed or has no token.
        """
        token = read_token(self.token_env)
        if self.loopback:
            return token
        if not self.allow_remote:
            raise ConfigError(
                f"{self.host} can be reached from other machines; allow that (--allow-remote) and put a token into "
                f"{self.token_env}, or listen on 127.0.0.1"
            )
        if token is None:
            raise ConfigError(
                f"a server on {self.host} needs a token: put one into {self.token_env}, here and for clients"
            )
        return token
