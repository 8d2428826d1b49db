"""Servers of tests, each in a thread of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from aiohttp import web

from reasonrag.core.serving import App, make_server
from tests.ports import keep_port


class HttpServer:
    """A server of aiohttp on loopback, in a thread with a loop of its own; `add_routes` says what it answers."""

    def __init__(self, port: int = 0) -> None:
        self._kept = keep_port(port)
        self.port: int = self._kept.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None

    def add_routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def start(self) -> Self:
        """Listen, again at the same port after `stop`, as a server that is started again does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        return self

    def stop(self) -> None:
        """Close the port and every connection, as the system does when a server dies."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._kept.close()

    async def _listen(self) -> None:
        app = web.Application()
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _end(self) -> None:
        await self._runner.cleanup()
        # Handlers of connections that a killed client left behind.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class ForkedServer:
    """A command that serves, in a forked process with signals and stderr of its own; the constructor waits for it."""

    def __init__(self, folder: Path, serve: Callable[[], int]) -> None:
        self._stderr = folder / "stderr"
        read, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                os.dup2(write, 1)
                os.dup2(os.open(self._stderr, os.O_WRONLY | os.O_CREAT), 2)
                # pytest has replaced both, which would keep what is printed.
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                code = serve()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(write)
        with os.fdopen(read) as stdout, self._limit():
            line = stdout.readline()
        assert line, self._stderr.read_text()
        self.port = int(line.split()[2].rpartition(":")[2])

    @contextmanager
    def _limit(self) -> Iterator[None]:
        """Kill a server that takes more than a minute."""
        timer = threading.Timer(60, self.send_signal, (signal.SIGKILL,))
        timer.start()
        yield
        timer.cancel()

    def send_signal(self, number: int) -> None:
        os.kill(self.process, number)

    def ended(self) -> tuple[int, str]:
        """Exit code and stderr; a server that does not end is killed."""
        with self._limit():
            _, status = os.waitpid(self.process, 0)
        return os.waitstatus_to_exitcode(status), self._stderr.read_text()


@contextmanager
def serving(app: App, *, close: bool = True) -> Iterator[int]:
    """Yield the port; start the application, and close it in the end."""
    server = make_server(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the product's

        async def run() -> None:
            if close:
                await app.start()
            await server.serve(sockets=[listener])
            if close:
                await app.aclose()

        def run_all() -> None:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(run())

        thread = threading.Thread(target=run_all)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
