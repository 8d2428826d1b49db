"""The shared part of our servers: who may ask, how large a request may be, and how the process ends.

A server is an ASGI application without a framework, because a framework's
layers took as long as the search of a query. It is made for one machine:
to serve others, put a reverse proxy in front of it (docs/engines.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import structlog

from reasonrag.core import event_loop
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import Section, setting
from reasonrag.core.text import one_line

if TYPE_CHECKING:
    from pydantic import ValidationError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = structlog.get_logger()

_SINGLE = (b"host", b"content-length", b"origin")  # two of them would mean another one to whatever passes requests on
_LOOPBACK_NAMES = (b"localhost", b"127.0.0.1", b"[::1]")
_LIBRARIES = ("httptools", "uvicorn", "websockets")  # of `reasonrag[serve]`
_SHOWN_PROBLEMS = 3
_MAX_HEAD_BYTES, _MAX_HEADERS = 64 << 10, 256
_MAX_CONNECTIONS = 4096
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
# Longer than common clients keep idle connections: a server
# that closes first may do so while a request arrives.
_KEEP_ALIVE_S = 120
_PIECE, _MOST_UNSENT = 1 << 16, 1 << 28
_STUCK_S = 60  # for a piece of an answer


class Refusal(Exception):
    """A request is not answered: the HTTP status, and the reason in one line."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(slots=True)
class Response:
    """An answer. A client may ask again after a second if its status is 503."""

    body: bytes
    status: int = 200
    media_type: str = "application/json"


Endpoint = Callable[[Scope, Receive], Awaitable[Response]]


class ListenSettings(Section):
    """Where a server listens on this machine (always on 127.0.0.1), and how it ends."""

    port: int = setting(8000, "port to listen on; 0 takes a free one", "--port", ge=0, le=65535)
    max_body_bytes: int = setting(4 << 20, "maximum bytes of a request's body", ge=1, le=1 << 30)
    drain_s: int = setting(30, "seconds to finish requests in flight after SIGTERM or Ctrl-C", ge=1)


def describe_problems(error: ValidationError) -> str:
    """Return the first problems of a request in one line; no value of the request is repeated."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    shown = (": ".join([*map(str, problem["loc"]), problem["msg"]]) for problem in problems[:_SHOWN_PROBLEMS])
    return one_line("; ".join(shown))


class App:
    """An ASGI 3 application: routes, and checks before them.

    Attributes:
        routes: method and endpoint by path.
    """

    def __init__(self, settings: ListenSettings) -> None:
        self.settings = settings
        self.routes: Mapping[str, tuple[str, Endpoint]] = {}
        self._unsent = 0  # bytes of answers

    async def start(self) -> None:
        """Check that requests can be answered, before the server listens."""

    def drain(self) -> None:
        """Take note that the server is about to end."""

    async def aclose(self) -> None:
        """Close the files and connections of the application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI 3 prescribes."""
        try:
            if scope["type"] == "websocket":
                self.check(scope)
                await self.converse(scope, receive, send)
                return
            response = await self.answer(scope, receive)
            length = b"%d" % len(response.body)
            headers = [(b"content-type", response.media_type.encode()), (b"content-length", length)]
            if response.status == 503:  # full, draining or not ready: clients may ask again soon
                headers.append((b"retry-after", b"1"))
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            self._unsent += len(response.body)
            try:
                for end in range(_PIECE, len(response.body) + _PIECE, _PIECE):
                    piece, more = response.body[end - _PIECE : end], end < len(response.body)
                    async with asyncio.timeout(_STUCK_S):  # it waits while the client does not read
                        await send({"type": "http.response.body", "body": piece, "more_body": more})
            finally:
                self._unsent -= len(response.body)
        except Refusal:
            await send({"type": "websocket.close"})  # before it is accepted: HTTP 403
        except (asyncio.CancelledError, OSError):
            pass  # the drain is over its deadline, or the client left
        except Exception as error:
            log.error("an answer broke off", error=type(error).__name__)

    async def answer(self, scope: Scope, receive: Receive) -> Response:
        """Return the answer of the endpoint, or of the refusal or failure."""
        try:
            self.check(scope)
            if self._unsent > _MOST_UNSENT:
                raise Refusal(503, "other clients do not read their answers, which fill the memory")
            if scope["path"] not in self.routes:
                raise Refusal(404, f"there is nothing here; ask one of {', '.join(self.routes)}")
            method, endpoint = self.routes[scope["path"]]
            if scope["method"] != method:
                raise Refusal(405, f"{scope['path']} takes {method}")
            return await endpoint(scope, receive)
        except Refusal as error:
            refusal = error
        except asyncio.CancelledError:
            # The drain is over its deadline. The task ends here in any case; the client learns why.
            refusal = Refusal(503, "the server stopped before the answer was there")
        except Exception as error:
            # Its message may quote the request.
            log.error("a request failed", error=type(error).__name__)
            refusal = Refusal(500, f"internal error ({type(error).__name__})")
        return Response(json.dumps({"detail": str(refusal)}).encode(), refusal.status)

    async def converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket until it is closed; raise Refusal if this path has none."""
        raise Refusal(404, "there is no WebSocket here")

    def check(self, scope: Scope) -> None:
        """Raise Refusal if the request comes through a foreign name or page."""
        header_names = [header_name for header_name, _ in scope["headers"]]
        if max(map(header_names.count, _SINGLE)) > 1:
            raise Refusal(400, "two headers Host, Content-Length or Origin: send one")
        headers: dict[bytes, bytes] = dict(scope["headers"])
        # A web page may reach a loopback address through a host name that it controls (DNS rebinding).
        if re.sub(rb":\d+$", b"", headers.get(b"host", b"").lower()) not in _LOOPBACK_NAMES:
            raise Refusal(400, "the Host header is not a name of this machine")
        # Browsers let any page open a WebSocket, and send a simple request, to any address. A page
        # without an address, such as a sandboxed frame, sends "null".
        origin = headers.get(b"origin", b"").lower()
        if origin and re.sub(rb":\d+$", b"", origin.partition(b"://")[2]) not in _LOOPBACK_NAMES:
            raise Refusal(403, "a page of another site asks")

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request; raise Refusal if it is too large, or the client left or was cut off."""
        limit = self.settings.max_body_bytes
        body, has_more = bytearray(), int(dict(scope["headers"]).get(b"content-length", 0)) <= limit
        while has_more and len(body) <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client left before the end of the body")
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if not has_more and len(body) <= limit:
                return bytes(body)
        raise Refusal(413, f"the body is larger than {limit} bytes: send less in one request")


def run_app(app: App, *, about: str = "") -> int:
    """Serve until SIGTERM or Ctrl-C, then close the application.

    Prints `listening on http://HOST:PORT (about)` once the server
    listens. The first signal lets requests in flight finish, for at
    most `drain_s` seconds; a second signal ends the process at once.

    Returns:
        The exit code: 128 plus the number of the signal.

    Raises:
        ConfigError: the port is taken, or the libraries of `reasonrag[serve]` are not installed.
    """
    if not all(map(find_spec, _LIBRARIES)):
        raise ConfigError(f"a server needs {', '.join(_LIBRARIES)}: pip install 'reasonrag[serve]'")
    server, port = make_server(app), app.settings.port

    async def serve() -> None:
        try:
            await app.start()
            try:
                listener = socket.create_server(("127.0.0.1", port), backlog=2048)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise ConfigError(f"127.0.0.1:{port} cannot be listened on ({reason}); choose another port") from None
            # asyncio sets this only on sockets that it created;
            # without it an answer waits 40 ms for an ACK.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with listener:
                address = f"http://127.0.0.1:{listener.getsockname()[1]}"
                print(f"listening on {address}{about and f' ({about})'}", flush=True)
                await server.serve(sockets=[listener])
        finally:
            await app.aclose()

    event_loop.run(serve())
    return 128 + int(sum(server.signals))


def make_server(app: App) -> Any:
    """Return a uvicorn server of the application. It keeps the signals that it got in `signals`."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(HttpToolsProtocol):
        """Limits headers and trailers, which uvicorn does only with h11, a much slower parser."""

        head_bytes = 0  # since headers ended or a piece of a body came

        def data_received(self, data: bytes) -> None:
            self.head_bytes += len(data)
            super().data_received(data)
            is_large = self.head_bytes > _MAX_HEAD_BYTES or len(self.headers or ()) > _MAX_HEADERS
            if is_large and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.scope["headers"] = self.headers.copy()  # without trailers, which uvicorn would add to them
            self.head_bytes = 0

        def on_body(self, body: bytes) -> None:
            super().on_body(body)
            self.head_bytes = 0

    class Server(uvicorn.Server):
        signals: list[int] = []  # noqa: RUF012 -- replaced in each server

        # Replaces uvicorn's handler, which kills the process with the same signal once it has drained.
        def handle_exit(self, number: int, frame: object) -> None:
            if self.signals:
                os._exit(128 + number)  # the search thread would keep the process alive
            self.signals = [number]
            app.drain()
            self.should_exit = True

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # else each client that sends garbage is on stderr
    config = uvicorn.Config(
        app,
        # `run_app` starts and closes the application, so that its errors end the command in one line.
        lifespan="off",
        http=Connection,
        ws="websockets-sansio" if type(app).converse is not App.converse else "none",
        ws_max_size=app.settings.max_body_bytes,
        # Anyone could claim another address by the headers of a proxy.
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=app.settings.drain_s,
    )
    return Server(config)
