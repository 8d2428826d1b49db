"""What commands share: plain logs, and a way to stop that keeps everything paid for."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from rich.console import Console

from reasonrag.text import one_line, printable

_QUIET = (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ("HF_HUB_VERBOSITY", "critical"),
)


def error_console() -> Console:
    """Where progress and hints go; text is shown as it is."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def run_draining(work: Coroutine[Any, Any, None], drain: Callable[[], None], console: Console) -> int:
    """Run `work`; the first Ctrl-C or SIGTERM calls `drain`, a second one ends the process.

    Returns:
        The number of the signal that stopped it, or 0.
    """
    return asyncio.run(_run_draining(work, drain, console))


async def _run_draining(work: Coroutine[Any, Any, None], drain: Callable[[], None], console: Console) -> int:
    stopped_by = 0

    def stop(number: int) -> None:
        nonlocal stopped_by
        if stopped_by:
            console.show_cursor(True)  # the live panel hid it
            os._exit(128 + number)  # threads of a model would keep the process; the journal is whole at any moment
        stopped_by = number
        drain()
        console.print("stopping when the calls in flight have ended; once more stops now")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await work
    return stopped_by


def say_how_to_go_on(console: Console) -> None:
    """After a stop."""
    console.print(f"stopped; everything paid for is kept. Go on with:\n  {_this_command()}")


def _this_command() -> str:
    return printable(shlex.join(["reasonrag", *sys.argv[1:]]))


def log_plainly() -> None:
    """Warnings as single lines on stderr, without control characters; no bars and hints of libraries."""
    for name, value in _QUIET:
        os.environ.setdefault(name, value)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _printable_values,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def _printable_values(logger: Any, method: str, event: Any) -> Any:
    return {key: printable(one_line(str(value))) for key, value in event.items()}
