"""Settings of a retrieval server: its address, and limits of requests, queue and batches."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, read_token
from reasonrag.core.settings import Section


class ServeSettings(Section):
    """Settings of `serve`. Only `max_query_chars` can change a ranking.

    Limits hold for one request, unless they say otherwise.
    """

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="port to listen on; 0 takes a free one")
    allow_remote: bool = Field(False, description="allow an address that other machines reach; needs a token")
    token_env: str = Field(
        TOKEN_ENV, description="environment variable with a token that clients have to send, if it is set"
    )
    top_k: Annotated[int, Field(ge=1)] = Field(3, description="passages per query, if a request does not say")
    max_top_k: Annotated[int, Field(ge=1)] = Field(1000, description="most passages per query")
    max_passages: Annotated[int, Field(ge=1)] = Field(
        100_000, description="most passages of a request: queries times passages per query"
    )
    max_queries: Annotated[int, Field(ge=1)] = Field(4096, description="most queries of a request")
    max_query_chars: Annotated[int, Field(ge=1)] = Field(4096, description="characters of a query; longer ones are cut")
    max_body_bytes: Annotated[int, Field(ge=1)] = Field(4 << 20, description="most bytes of a request's body")
    max_queue: Annotated[int, Field(ge=1)] = Field(16384, description="most unanswered queries of all requests")
    window_ms: Annotated[float, Field(ge=0)] = Field(
        2.0, description="milliseconds that a query waits for others to be searched with"
    )
    max_batch: Annotated[int, Field(ge=1)] = Field(256, description="most queries that are searched together")
    cached_rankings: Annotated[int, Field(ge=0)] = Field(0, description="rankings kept in memory; 0 keeps none")
    health_timeout_s: Annotated[float, Field(gt=0)] = Field(10.0, description="seconds for the query behind /health")
    drain_s: Annotated[int, Field(ge=1)] = Field(
        30, description="seconds for requests in flight after SIGTERM or Ctrl-C"
    )
    access_log: bool = Field(False, description="log a line per request to stderr, without its queries")

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches `host`."""
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
