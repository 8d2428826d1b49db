"""Settings of a retrieval server: its address, and limits of requests, queue and batches."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, read_token
from reasonrag.core.settings import Flag, Section


class ServeSettings(Section):
    """Settings of `serve`. Only `max_query_chars` can change a ranking.

    Limits hold for one request, unless they say otherwise.
    """

    host: Annotated[
        str,
        Field(description="address to listen on; one that other machines reach needs --allow-remote"),
        Flag("--host"),
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one"), Flag("--port")] = (
        8000
    )
    allow_remote: Annotated[
        bool, Field(description="serve other machines; requires a token"), Flag("--allow-remote")
    ] = False
    token_env: Annotated[
        str,
        Field(description="environment variable that holds a token; if it is set, clients must send it"),
        Flag("--token-env"),
    ] = TOKEN_ENV
    top_k: Annotated[
        int, Field(ge=1, description="passages per search. A request may ask for another number"), Flag("--top-k")
    ] = 3
    max_top_k: Annotated[int, Field(ge=1, description="maximum passages per query")] = 1000
    max_passages: Annotated[
        int, Field(ge=1, description="maximum passages of a request: queries times passages per query")
    ] = 100_000
    max_queries: Annotated[int, Field(ge=1, description="maximum queries of a request")] = 4096
    max_query_chars: Annotated[int, Field(ge=1, description="characters of a query; longer queries are cut")] = 4096
    max_body_bytes: Annotated[int, Field(ge=1, description="maximum bytes of a request's body")] = 4 << 20
    max_queue: Annotated[int, Field(ge=1, description="maximum unanswered queries of all requests")] = 16384
    window_ms: Annotated[
        float, Field(ge=0, description="milliseconds that a query waits so that several are searched together")
    ] = 2.0
    max_batch: Annotated[int, Field(ge=1, description="maximum queries that are searched together")] = 256
    cached_rankings: Annotated[int, Field(ge=0, description="rankings kept in memory for repeated queries")] = 0
    health_timeout_s: Annotated[float, Field(gt=0, description="timeout in seconds of the query behind /health")] = 10.0
    drain_s: Annotated[int, Field(ge=1, description="seconds to finish requests in flight after SIGTERM or Ctrl-C")] = (
        30
    )
    access_log: Annotated[bool, Field(description="log one line per request on stderr, without its queries")] = False

    @property
    def loopback(self) -> bool:
        """Whether no other machine reaches `host`."""
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
