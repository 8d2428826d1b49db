"""What commands share on a terminal: consoles, plain logs, progress, and Ctrl-C that keeps all finished work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, Self

import structlog
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reasonrag.core.text import duration, one_line, pace, printable

_PLAIN_EVERY_S = 10.0
_QUIET = (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ("HF_HUB_VERBOSITY", "critical"),
)


def error_console() -> Console:
    """Return the console of progress and hints, which prints text as it is."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def table_console() -> Console:
    """Return the console of results. A pipe has no width, so tables get enough there and are not squeezed."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def log_plainly() -> None:
    """Log warnings as single lines on stderr, without control characters; silence the bars and hints of libraries."""
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


# --- Stopping ---


class Stop:
    """The first Ctrl-C or SIGTERM lets calls in flight end, a second one ends the process."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.number = 0  # the signal that arrived; 0 before

    @contextlib.asynccontextmanager
    async def show(self, progress: Progress, drain: Callable[[], None]) -> AsyncIterator[None]:
        """Show the progress of a run while the body runs, and call `drain` at the first signal."""
        loop = asyncio.get_running_loop()
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in previous:
            loop.add_signal_handler(number, self._on_signal, number, drain)
        with Display(self.console, progress) as display:
            printing = asyncio.create_task(display.print_lines())
            try:
                yield
            finally:
                printing.cancel()
                if not self.console.is_terminal:
                    display.print_line()
                for number, handler in previous.items():
                    loop.remove_signal_handler(number)
                    signal.signal(number, handler)

    def _on_signal(self, number: int, drain: Callable[[], None]) -> None:
        if self.number:
            self.console.show_cursor(True)  # the live display hid it
            os._exit(128 + number)  # threads of a model would keep the process; the journal is whole at any moment
        self.number = number
        drain()
        self.console.print("stopping when the calls in flight have ended; press Ctrl-C again to stop now")

    def print_resume_hint(self) -> int:
        """Print how to resume after a stop; return the exit code."""
        self.console.print(f"stopped; all finished work is kept. Resume with:\n  {this_command()}")
        return 128 + self.number

    def print_missing(self, causes: Mapping[str, int], untried: int, *, most: float) -> int:
        """Print how many questions have no result, by cause; return the exit code, 1 for more than `most`."""
        failed = sum(causes.values())
        if failed or untried:
            self.console.print(printable(f"{failed} questions failed, {untried} were not tried{what_to_do(causes)}"))
        return int(failed + untried > most)


# What helps against a failure that would come again.
_REMEDIES = {
    "context_overflow": "make the prompts shorter, in a new folder (--top-k 1, --set retrieval.max_passage_chars=1000, "
    "fewer --max-turns, --prompts brief), or take a model with a longer context",
    "out_of_memory": "take a smaller model, or a server, or --set policy.batch_size=1",
}


def what_to_do(causes: Mapping[str, int]) -> str:
    """Return failures by cause, the most frequent first, and what helps against that one, as the end of a line.

    >>> what_to_do({"unreachable": 2})
    ' (2 unreachable); the same command tries them again'
    """
    ordered = Counter(causes).most_common()
    counts = f" ({', '.join(f'{count} {cause}' for cause, count in ordered)})" if ordered else ""
    remedy = _REMEDIES.get(ordered[0][0]) if ordered else None
    return f"{counts}; {remedy or 'the same command tries them again'}"


def this_command() -> str:
    """Return the command line of this process, as it was typed."""
    return printable(shlex.join(["reasonrag", *sys.argv[1:]]))


# --- Progress ---


class Progress(Protocol):
    """Work that knows how far it is: questions of a run, rows of an index."""

    @property
    def share(self) -> float | None: ...
    @property
    def eta_s(self) -> float | None: ...
    def failures(self) -> list[str]: ...
    def line(self) -> str: ...


class Display:
    """Shows progress and the causes of failures: a live bar on a terminal, plain lines every ten seconds elsewhere."""

    def __init__(self, console: Console, progress: Progress | None = None) -> None:
        self.console = console
        self.progress = progress
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.progress is not None:
            share = self.progress.share
            grid = Table.grid()
            grid.add_row(ProgressBar(total=None if share is None else 1, completed=share or 0, width=60))
            for line in (self._line(self.progress), *self.progress.failures()):
                grid.add_row(Text(printable(line)))
            yield grid

    def print_if_due(self) -> None:
        """Print the line if no bar shows it and ten seconds have passed."""
        if self._live is None and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S:
            self.print_line()

    async def print_lines(self) -> None:
        """Print the line every ten seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(1)
            self.print_if_due()

    def print_line(self) -> None:
        self._printed_at = time.monotonic()
        if self.progress is not None:
            self.print("\n  ".join([self._line(self.progress), *self.progress.failures()]))

    def print(self, text: str) -> None:
        """Print a text that may come from anywhere."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _line(self, progress: Progress) -> str:
        return progress.line() + ("" if progress.eta_s is None else f", {duration(progress.eta_s)} left")


class StageLines(Display):
    """Shows the stages of an index build (it is a `BuildProgress`). The last line of each stage stays."""

    def __exit__(self, *_: object) -> None:
        self._end()
        super().__exit__()

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """Begin a stage with `done` of `total` units finished; total None is unknown."""
        self._end()
        self.progress = _Stage(what, total, unit, done)

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` more units as finished, and print the line if it is due."""
        if isinstance(self.progress, _Stage):
            self.progress.advance(amount)
            self.print_if_due()

    def note(self, text: str) -> None:
        """End the stage, and print a line below it."""
        self._end()
        self.print(text)

    def _end(self) -> None:
        self.print_line()
        self.progress = None


class _Stage:
    """One stage of an index build, with its rate and the time left."""

    def __init__(self, what: str, total: float | None, unit: str, done: float) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self._done_before = done
        self._began_at = self._advanced_at = time.monotonic()

    def advance(self, amount: float) -> None:
        self.done += amount
        self._advanced_at = time.monotonic()

    @property
    def share(self) -> float | None:
        return None if self.total is None else self.done / max(self.total, 1)

    @property
    def _seconds(self) -> float:
        complete = self.total is not None and self.done >= self.total
        return (self._advanced_at if complete else time.monotonic()) - self._began_at

    @property
    def _rate(self) -> float:
        return (self.done - self._done_before) / self._seconds if self._seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        if self.total is None or self.done >= self.total or self._rate == 0:
            return None
        return (self.total - self.done) / self._rate

    def failures(self) -> list[str]:
        return []

    def line(self) -> str:
        of_total = "" if self.total is None else f" of {self.total:,.0f} ({self.done / max(self.total, 1):.0%})"
        rate = pace(self.done - self._done_before, self._seconds)
        return f"{self.what}: {self.done:,.0f}{of_total} {self.unit}, {rate}, {duration(self._seconds)}"
