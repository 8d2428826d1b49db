"""What commands share: plain logs, and a way to stop that keeps everything paid for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog
from rich.console import Console

from reasonrag.core.text import one_line, printable

_QUIET = (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ("HF_HUB_VERBOSITY", "critical"),
)


def error_console() -> Console:
    """Where progress and hints go; text is shown as it is."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def table_console() -> Console:
    """Where results go; a pipe or a file has no width of its own, and tables are not squeezed for it."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


class Stop:
    """The first Ctrl-C or SIGTERM lets calls in flight end, a second one ends the process."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.number = 0  # of the signal that came; 0 while none has

    @contextlib.asynccontextmanager
    async def heeded(self, drain: Callable[[], None]) -> AsyncIterator[None]:
        """While the body runs, the first signal calls `drain`."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, self._come, number, drain)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _come(self, number: int, drain: Callable[[], None]) -> None:
        if self.number:
            self.console.show_cursor(True)  # the live panel hid it
            os._exit(128 + number)  # threads of a model would keep the process; the journal is whole at any moment
        self.number = number
        drain()
        self.console.print("stopping when the calls in flight have ended; once more stops now")

    def say_how_to_go_on(self) -> int:
        """After a stop; returns the exit code."""
        self.console.print(f"stopped; everything paid for is kept. Go on with:\n  {this_command()}")
        return 128 + self.number


def this_command() -> str:
    """As it was typed."""
    return printable(shlex.join(["reasonrag", *sys.argv[1:]]))


def log_plainly() -> None:
    """Warnings as single lines on stderr, without control characters; no bars and hints of libraries."""
    for name, value in _QUIET:
        os.environ.setdefault(name, value)
    structlog.configure(
        processors=[
            _drop_retries,
            structlog.processors.add_log_level,
            _printable_values,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def _drop_retries(logger: Any, method: str, event: Any) -> Any:
    # stamina logs every retry, and hundreds of requests may wait for one server.
    if event["event"] == "stamina.retry_scheduled":
        raise structlog.DropEvent
    return event


def _printable_values(logger: Any, method: str, event: Any) -> Any:
    return {key: printable(one_line(str(value))) for key, value in event.items()}
