"""A retrieval server in a process of its own: it says when it is ready, and ends without dropping a request."""

from __future__ import annotations

import asyncio
import errno
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.server.app import build_app
from reasonrag.retrieval.server.protocol import Refusal
from reasonrag.retrieval.server.service import RetrievalService
from reasonrag.retrieval.server.settings import ServeSettings

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

_NEEDED = ("fastapi", "prometheus_client", "uvicorn")
# Longer than the clients in use keep idle connections: a server that closes one first may do so under a request.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048


def serve(retriever: Retriever, settings: ServeSettings, *, about: str = "") -> int:
    """Serve until SIGTERM or Ctrl-C, and close the retriever.

    The line `listening on http://HOST:PORT (about)` is printed once it listens and a first query was answered. The
    first signal lets requests in flight end, for `drain_s` at most; a second one ends the process.

    Args:
        retriever: what is served.
        settings: where, and how much at a time.
        about: what is served, for the line that says so.

    Returns:
        The exit code: 128 and the number of the signal.

    Raises:
        ConfigError: the port is taken, the host is not an address of this machine, a token is missing, or the
            libraries of `reasonrag[serve]` are.
        RetrievalError: the first query was not answered.
    """
    if not all(map(find_spec, _NEEDED)):
        raise ConfigError(f"a server needs {', '.join(_NEEDED)}: pip install 'reasonrag[serve]'")
    from reasonrag.retrieval.server.draining import DrainingServer

    service = RetrievalService(retriever, settings)
    config = _config(build_app(service, settings), settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(_first_query(service))
            with _listen(settings.host, settings.port) as listener:
                ready = f"listening on {_url(listener)}{about and f' ({about})'}"
                server = DrainingServer(config, on_ready=lambda: print(ready, flush=True), on_drain=service.drain)
                runner.run(server.serve(sockets=[listener]))
        finally:
            runner.run(service.aclose())
    return 128 + server.signal


def _config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    import uvicorn

    # Without a configuration of its own, uvicorn says nothing below a warning.
    log_config = uvicorn.config.LOGGING_CONFIG if settings.access_log else None
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=settings.access_log,
        log_config=log_config,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.drain_s,
    )


async def _first_query(service: RetrievalService) -> None:
    try:
        await service.probe()
    except Refusal as refusal:
        raise RetrievalError(f"the index cannot be served: {refusal}", cause="unhealthy") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # asyncio sets this only on sockets that it has made itself; without it an answer waits 40 ms for an ACK.
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
