"""An application in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from reasonrag.core.serving import App


@contextmanager
def serving(app: App) -> Iterator[int]:
    """Yield the port."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def run() -> None:
            await app.start()
            await server.serve(sockets=[listener])
            await app.aclose()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
