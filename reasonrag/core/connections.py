"""What bounds the connections of our servers: uvicorn, with the limits on a client that its protocols lack.

A client has so many bytes and so much time for what it sends, reads what it is answered, and lets others have their
turn. Imported when a server starts, as uvicorn is in `reasonrag[serve]`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from reasonrag.core.errors import ConfigError
from reasonrag.core.serving import App

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # a header of four bytes takes a hundred and fifty here
_MAX_CONNECTIONS = 4096
_MAX_PIPELINED = 128
_MAX_UNREAD_BYTES = 1 << 30  # of all answers
# uvloop reads up to 32 pieces of 256 KB from one client before it looks at the next one.
_LARGE_PIECE = 64 << 10
# Longer than common clients keep idle connections: a server that closes first may do so while a request arrives.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048


class HttpConnection(HttpToolsProtocol):
    """A client that sends requests."""

    _no_body = 0  # bytes since headers ended or some of a body came: headers, trailers, blank lines

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            self.refuse(503)

    def data_received(self, data: bytes) -> None:
        self._no_body += len(data)
        super().data_received(data)
        if self._no_body > _MAX_HEAD_BYTES or len(self.headers or ()) > _MAX_HEADERS:
            self.refuse(431)
        elif len(self.pipeline) > _MAX_PIPELINED:
            self.transport.abort()  # it asks without end and waits for no answer
        elif len(data) > _LARGE_PIECE and not self.flow.read_paused:
            self.flow.pause_reading()
            self.loop.call_soon(self.flow.resume_reading)

    def on_headers_complete(self) -> None:
        if not self.url.startswith((b"/", b"*")):
            raise ValueError("the target names a server, which need not be that of the Host header")
        super().on_headers_complete()
        self.scope["headers"] = self.headers.copy()  # without trailers, which uvicorn would add to them
        self._no_body = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._no_body = 0

    @property
    def waits_for(self) -> object:
        """The request whose headers or body the client still has to send; None if there is none, or was none since."""
        if self.cycle is None or self.cycle.scope is not self.scope:
            return self.scope or self
        return self.cycle if self.cycle.more_body else None

    def refuse(self, status: int) -> None:
        """Answer what is no request, or not all of one, and end the connection."""
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A client with a session, or one that has asked for it."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(data) > _LARGE_PIECE or not self.writable.is_set():  # it does not read the answers to its pings
            self.read_paused = True
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on()

    def _read_on(self) -> None:
        if self.read_paused and self.writable.is_set() and self.queue.empty() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    @property
    def waits_for(self) -> object:
        """The handshake, or the message whose last frame the client still has to send."""
        return self.frames or None if self.handshake_complete else self

    def refuse(self, status: int) -> None:
        """End the connection: nothing that has a status was asked."""
        self.transport.close()


class Server(uvicorn.Server):
    """Serves an application until a signal, which it keeps in `signals`.

    The first one lets requests in flight finish, for at most `drain_s` seconds; a second one ends the process.
    """

    def __init__(self, app: App, about: str = "") -> None:
        settings = app.settings
        if not settings.access_log:  # uvicorn would write to stderr each time that a client sends garbage
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http=HttpConnection,
                ws=WebSocketConnection if type(app).converse is not App.converse else "none",
                ws_max_size=settings.max_body_bytes,
                proxy_headers=False,
                server_header=False,
                access_log=settings.access_log,
                # Without a logging configuration, uvicorn logs nothing below a warning.
                log_config=uvicorn.config.LOGGING_CONFIG if settings.access_log else None,
                backlog=_BACKLOG,
                limit_concurrency=2 * _MAX_CONNECTIONS,  # also of requests whose clients have left
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=settings.drain_s,
            )
        )
        self.signals: list[int] = []
        self._app = app
        self._about = about
        # For what each client is waited for, how many bytes it has not read, and since when.
        self._waits: dict[Any, tuple[object, int, float]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(f"listening on {url}{self._about and f' ({self._about})'}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second, which costs a request nothing
            self._end_overdue()
        return await super().on_tick(counter)

    def _end_overdue(self) -> None:
        """End connections whose client does not send or read on, and those with most to read if all have too much."""
        now, before, self._waits, all_unread = time.monotonic(), self._waits, {}, 0
        connections: set[Any] = self.server_state.connections
        for connection in sorted(connections, key=lambda one: one.transport.get_write_buffer_size()):
            what, unread = connection.waits_for, connection.transport.get_write_buffer_size()
            if what is not None or unread:
                what_before, unread_before, since = before.get(connection, (None, 0, now))
                if what is not what_before or unread < unread_before:
                    since = now
                self._waits[connection] = what, unread, since
                all_unread += unread
                is_overdue = now - since > self._app.settings.client_timeout_s
                if unread and (is_overdue or all_unread > _MAX_UNREAD_BYTES):
                    connection.transport.abort()
                elif is_overdue:
                    connection.refuse(408)

    # Replaces uvicorn's handler, which kills the process with the same signal once it has drained.
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signals:
            os._exit(128 + sig)  # the search thread would keep the process alive
        self.signals.append(sig)
        self._app.drain()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ConfigError if the port is taken or the address is none of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # asyncio sets this only on sockets that it created; without it an answer waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        reason = error.strerror or type(error).__name__
        advice = "stop what listens there, or choose another address or port"
        raise ConfigError(f"{host}:{port} cannot be listened on ({reason}); {advice}") from None
