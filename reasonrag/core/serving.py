"""What the servers of this package share: who may ask, how large a request may be, and how the process ends.

A server is an ASGI application without a framework, because a framework's layers took as long as the search of a query.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import TOKEN_ENV, read_token
from reasonrag.core.settings import Section, setting
from reasonrag.core.text import one_line

if TYPE_CHECKING:
    import uvicorn
    from pydantic import ValidationError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Mapping[bytes, bytes]

_BODY_TIMEOUT_S = 30.0
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Longer than common clients keep idle connections: a server that closes first may do so while a request arrives.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048
_SHOWN_PROBLEMS = 3


class Refusal(Exception):
    """A request is not answered: the HTTP status, and the reason in one line."""

    def __init__(
        self, status: int, detail: str, *, retry_after_s: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def response(self) -> Response:
        """Return what the client is sent."""
        return Response(json.dumps({"detail": str(self)}).encode(), self.status, headers=self.headers)


@dataclass(slots=True)
class Response:
    """An answer; one whose length is not known yet is sent piece by piece."""

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


Endpoint = Callable[[Scope, Receive], Awaitable[Response]]


class ListenSettings(Section):
    """Where a server listens, whom it answers, and how it ends."""

    host: str = setting(
        "127.0.0.1", "address to listen on; one that other machines reach needs --allow-remote", "--host"
    )
    port: int = setting(8000, "port to listen on; 0 takes a free one", "--port", ge=0, le=65535)
    allow_remote: bool = setting(False, "serve other machines; requires a token", "--allow-remote")
    token_env: str = setting(
        TOKEN_ENV, "environment variable that holds a token; if it is set, clients must send it", "--token-env"
    )
    max_body_bytes: int = setting(4 << 20, "maximum bytes of a request's body", ge=1)
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


def describe_problems(error: ValidationError) -> str:
    """Return the first problems of a request in one line; no value of the request is repeated."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    return one_line("; ".join(": ".join([*map(str, one["loc"]), one["msg"]]) for one in problems[:_SHOWN_PROBLEMS]))


class App:
    """An ASGI 3 application: routes, and what is checked before one of them is asked.

    Attributes:
        routes: method and endpoint by path.
    """

    def __init__(self, settings: ListenSettings, *, token: str | None) -> None:
        self.settings = settings
        self.routes: Mapping[str, tuple[str, Endpoint]] = {}
        self._token = None if token is None else token.encode()
        # A web page may reach a loopback address through a host name that it controls (DNS rebinding).
        self._hosts = {name.encode() for name in (*_LOOPBACK_NAMES, settings.host)} if settings.loopback else None

    async def start(self) -> None:
        """Check that requests can be answered, before the server listens."""

    def drain(self) -> None:
        """Take note that the server is about to end."""

    async def aclose(self) -> None:
        """Close what the application has opened."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI 3 prescribes."""
        headers = dict(scope["headers"])
        if scope["type"] == "websocket":
            try:
                self.check(headers, scope["path"])
                await self.converse(scope, receive, send)
            except Refusal:
                await send({"type": "websocket.close"})  # before it is accepted: HTTP 403
            return
        try:
            self.check(headers, scope["path"])
            response = await self.route(scope)(scope, receive)
        except Refusal as refusal:
            response = refusal.response()
        await _send_response(response, send)

    async def converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket until it is closed; raise Refusal if there is none at this path."""
        raise Refusal(404, "there is no WebSocket here")

    def check(self, headers: Headers, path: str) -> None:
        """Raise Refusal if the request comes through a foreign name or page, or lacks the token."""
        if self._hosts is not None:
            if re.sub(rb":\d+$", b"", headers.get(b"host", b"").lower()) not in self._hosts:
                raise Refusal(400, "the Host header is not a name of this machine")
            origin = headers.get(b"origin", b"").lower().partition(b"://")[2]
            # Browsers let any page open a WebSocket, and send a simple request, to any address.
            if origin and re.sub(rb":\d+$", b"", origin) not in self._hosts:
                raise Refusal(403, "a page of another site asks")
        if self._token is not None and path != "/health":
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
                raise Refusal(
                    401,
                    "this server needs a token, sent as Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def route(self, scope: Scope) -> Endpoint:
        """Return what answers a request; raise Refusal if nothing does."""
        path = scope["path"]
        if path not in self.routes:
            known = [f"{method} {known}" for known, (method, _) in self.routes.items()]
            raise Refusal(404, f"there is nothing here; ask {', '.join(known[:-1])} or {known[-1]}")
        method, endpoint = self.routes[path]
        if scope["method"] not in (method, "HEAD" if method == "GET" else method):
            raise Refusal(405, f"{path} takes {method}", headers={"Allow": method})
        return endpoint

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request; raise Refusal if it is too large, does not come, or the client left."""
        limit = self.settings.max_body_bytes
        refusal = Refusal(413, f"the body is larger than {limit} bytes: send less in one request")
        if int(dict(scope["headers"]).get(b"content-length", 0)) > limit:
            raise refusal
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the client left before the end of the body")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise refusal
        except TimeoutError:
            raise Refusal(408, f"the body was not there after {_BODY_TIMEOUT_S:g} s") from None
        return bytes(body)


def run_app(app: App, *, about: str = "", needs: tuple[str, ...] = ("uvicorn",)) -> int:
    """Serve until SIGTERM or Ctrl-C, then close the application.

    Prints `listening on http://HOST:PORT (about)` once the server listens. The first signal lets requests in flight
    finish, for at most `drain_s` seconds; a second signal ends the process at once.

    Returns:
        The exit code: 128 plus the number of the signal.

    Raises:
        ConfigError: the port is taken, the host is not an address of this machine, or the libraries of
            `reasonrag[serve]` are not installed.
    """
    if not all(map(find_spec, needs)):
        raise ConfigError(f"a server needs {', '.join(needs)}: pip install 'reasonrag[serve]'")
    settings = app.settings
    config = _config(app, settings)
    signals: list[int] = []
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(app.start())
            with _listen(settings.host, settings.port) as listener:
                ready = f"listening on {_url(listener)}{about and f' ({about})'}"
                runner.run(_server(config, app, ready, signals).serve(sockets=[listener]))
        finally:
            runner.run(app.aclose())
    return 128 + sum(signals)


async def _send_response(response: Response, send: Send) -> None:
    head = {"content-type": response.media_type, **response.headers}
    if isinstance(response.body, bytes):
        head["content-length"] = str(len(response.body))
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if isinstance(response.body, bytes):
        await send({"type": "http.response.body", "body": response.body})
        return
    async with aclosing(response.body) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _server(config: uvicorn.Config, app: App, ready: str, signals: list[int]) -> uvicorn.Server:
    """Build a server that prints `ready` once it listens, and puts the signal that ended it into `signals`."""
    import uvicorn

    class DrainingServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(ready, flush=True)

        # Replaces uvicorn's handler, which kills the process with the same signal once it has drained.
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if signals:
                os._exit(128 + sig)  # the search thread would keep the process alive
            signals.append(sig)
            app.drain()
            self.should_exit = True

    return DrainingServer(config)


def _config(app: App, settings: ListenSettings) -> uvicorn.Config:
    import uvicorn

    # Without a logging configuration, uvicorn logs nothing below a warning.
    log_config = uvicorn.config.LOGGING_CONFIG if settings.access_log else None
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="auto" if type(app).converse is not App.converse else "none",
        ws_max_size=settings.max_body_bytes,
        proxy_headers=False,
        server_header=False,
        access_log=settings.access_log,
        log_config=log_config,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.drain_s,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # asyncio sets this only on sockets that it created; without it an answer waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is taken; stop what listens there, or choose another") from None
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{host}:{port} cannot be listened on ({reason}); choose another address or port") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
