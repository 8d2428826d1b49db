"""Run a retrieval server: print a line when it is ready, and end without dropping a request."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.server.app import RetrievalApp
from reasonrag.retrieval.server.protocol import Refusal
from reasonrag.retrieval.server.service import RetrievalService
from reasonrag.retrieval.server.settings import ServeSettings

if TYPE_CHECKING:
    import uvicorn

_NEEDED = ("prometheus_client", "uvicorn")
# Longer than common clients keep idle connections: a server that closes first may do so while a request arrives.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048


def serve(retriever: Retriever, settings: ServeSettings, *, about: str = "") -> int:
    """Serve until SIGTERM or Ctrl-C, then close the retriever.

    Prints `listening on http://HOST:PORT (about)` once the server listens and has answered a first query. The first
    signal lets requests in flight finish, for at most `drain_s` seconds; a second signal ends the process at once.

    Returns:
        The exit code: 128 plus the number of the signal.

    Raises:
        ConfigError: the port is taken, the host is not an address of this machine, a token is missing, or the
            libraries of `reasonrag[serve]` are not installed.
        RetrievalError: the first query was not answered.
    """
    if not all(map(find_spec, _NEEDED)):
        raise ConfigError(f"a server needs {', '.join(_NEEDED)}: pip install 'reasonrag[serve]'")
    service = RetrievalService(retriever, settings)
    config = _config(RetrievalApp(service, settings), settings)
    signals: list[int] = []
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(service.probe())
            with _listen(settings.host, settings.port) as listener:
                ready = f"listening on {_url(listener)}{about and f' ({about})'}"
                runner.run(_server(config, service, ready, signals).serve(sockets=[listener]))
        except Refusal as refusal:  # of the first query
            raise RetrievalError(f"the index cannot be served: {refusal}", cause="unhealthy") from None
        finally:
            runner.run(service.aclose())
    return 128 + sum(signals)


def _server(config: uvicorn.Config, service: RetrievalService, ready: str, signals: list[int]) -> uvicorn.Server:
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
            service.drain()
            self.should_exit = True

    return DrainingServer(config)


def _config(app: RetrievalApp, settings: ServeSettings) -> uvicorn.Config:
    import uvicorn

    # Without a logging configuration, uvicorn logs nothing below a warning.
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
