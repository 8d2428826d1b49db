"""Where a retrieval server listens, and how much it takes on at a time."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, read_token
from reasonrag.core.settings import Section


class ServeSettings(Section):
    """Settings of `serve`. None of them changes a ranking, but for `max_query_chars`.

    Limits are of one request unless they say otherwise.
    """

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="port to listen on; 0 takes a free one")
    allow_remote: bool = Field(False, description="an address that other machines reach; needs a token")
    token_env: str = Field(
        TOKEN_ENV, description="variable that holds a token; where it is set, clients have to send it"
    )
    top_k: Annotated[int, Field(ge=1)] = Field(3, description="passages per query where a request does not say")
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
    cached_rankings: Annotated[int, Field(ge=0)] = Field(0, description="rankings kept for when they are asked again")
    health_timeout_s: Annotated[float, Field(gt=0)] = Field(10.0, description="seconds for the query behind /health")
    drain_s: Annotated[int, Field(ge=1)] = Field(
        30, description="seconds for requests in flight after SIGTERM or Ctrl-C"
    )
    access_log: bool = Field(False, description="a line per request on stderr, without its queries")

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches `host`."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self) -> str | None:
        """What clients have to send, or None where nothing is asked of them.

        Raises:
            ConfigError: an address that other machines reach, without leave or without a token.
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
