"""What commands share on a terminal: consoles, plain logs, progress, and Ctrl-C that keeps all finished work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import rich.progress
import structlog
from rich.console import Console
from rich.live import Live
from rich.text import Text

from reasonrag.core.errors import ConfigError, Interrupted, check_limits
from reasonrag.core.event_loop import draining
from reasonrag.core.text import duration, excerpt, one_line, printable

if TYPE_CHECKING:
    from reasonrag.pipeline.work import Progress

_PLAIN_EVERY_S = 10.0
_QUIET = (("TRANSFORMERS_VERBOSITY", "error"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("HF_HUB_VERBOSITY", "critical"))


def error_console() -> Console:
    """Return the console of progress and hints, which prints text as it is."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def table_console() -> Console:
    """Return the console of results. A pipe has no width, so tables get enough there and are not squeezed."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def is_quiet() -> bool:
    """Return whether the command was given as `reasonrag --quiet COMMAND`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def log_plainly() -> None:
    """Log warnings as single lines on stderr, without control characters; silence the bars and hints of libraries."""
    # Before the libraries are imported, which read these variables once. A value of the user's stays.
    for name, value in _QUIET:
        os.environ.setdefault(name, value)
    structlog.configure(
        processors=[structlog.processors.add_log_level, _plain_event, structlog.dev.ConsoleRenderer(colors=False)],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def open_tracker(name: str | None) -> Callable[[Path, Mapping[str, Any]], None]:
    """Return a function that sends the numbers of a tree, such as `{"pairs": {"train": 9}}`, to a tracker.

    It gets the folder of the run; one that writes files has them in its `tracked`. Without a name, nothing is sent.

    Raises:
        ConfigError: accelerate does not know the tracker, or its package is not installed.
    """
    if name is None:
        return lambda out, numbers: None
    try:
        from accelerate import Accelerator
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError:
        raise ConfigError("--report-to needs the package accelerate: pip install 'reasonrag[train]'") from None
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(f"--report-to {name} is no tracker; those are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    if name not in map(str, get_available_trackers()):
        raise ConfigError(f"--report-to {name}: its package is not installed; add it with pip install {name}")

    def send(out: Path, numbers: Mapping[str, Any]) -> None:
        try:
            accelerator = Accelerator(cpu=True, log_with=name, project_dir=out / "tracked")
            accelerator.init_trackers("reasonrag", init_kwargs={"wandb": {"name": out.name}})
            accelerator.log(dict(_leaves(numbers)), step=0)
            accelerator.end_training()
        except Exception as error:  # of a service, or a full disk: the run is whole without it
            check_limits(error)
            error_console().print(printable(f"{name} did not take the numbers: {excerpt(str(error))}"))

    return send


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a tree of names, by path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def _plain_event(logger: Any, method: str, event: Any) -> Any:
    # stamina logs every retry, and hundreds of requests may wait for one server.
    if event["event"] == "stamina.retry_scheduled":
        raise structlog.DropEvent
    return {key: printable(one_line(str(value))) for key, value in event.items()}


def this_command() -> str:
    """Return the command line of this process, as it was typed."""
    return printable(shlex.join(["reasonrag", *sys.argv[1:]]))


def what_to_do(causes: Mapping[str, int]) -> str:
    """Return failures by cause, the most frequent first, as the end of a line.

    >>> what_to_do({"unreachable": 2})
    ' (2 unreachable); the same command tries them again'
    """
    counts = ", ".join(f"{count} {cause}" for cause, count in Counter(causes).most_common())
    return f"{f' ({counts})' if counts else ''}; the same command tries them again"


# --- Progress ---


class Display:
    """Shows progress and the causes of failures: live on a terminal, as plain lines every ten seconds elsewhere."""

    def __init__(self, console: Console, work: Progress | None = None) -> None:
        self.console, self.work, self._is_quiet = console, work, is_quiet()
        # transient: the line disappears at the end, when a table of results takes its place.
        self._live = Live(
            get_renderable=lambda: Text(printable(self._text())), console=console, refresh_per_second=4, transient=True
        )
        self._printed_at = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self._is_quiet:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    async def print_lines(self) -> None:
        """Print the progress every ten seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(1)
            self.print_if_due()

    def print_if_due(self) -> None:
        """Print the progress if it is not shown live and ten seconds have passed."""
        if not self.console.is_terminal and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S:
            self.print_progress()

    def print_progress(self) -> None:
        """Print the progress as lines that stay."""
        self._printed_at = time.monotonic()
        if (text := self._text()) and not self._is_quiet:
            self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _text(self) -> str:
        if self.work is None:
            return ""
        left = "" if self.work.eta_s is None else f", {duration(self.work.eta_s)} left"
        return "\n  ".join([self.work.line() + left, *self.work.failures()])


class StageLines(Display):
    """Shows the stages of an index build (it is a `BuildProgress`). The last line of each stage stays."""

    def __init__(self, console: Console) -> None:
        self._stages = rich.progress.Progress(disable=True)  # counts, the pace and the time left, drawn by `Display`
        self._stage: rich.progress.Task | None = None
        super().__init__(console)

    def __exit__(self, *_: object) -> None:
        self._end()
        super().__exit__()

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """Begin a stage with `done` of `total` units finished; total None is unknown."""
        self._end()
        self._stages.add_task(what, total=total, completed=int(done), unit=unit)
        self._stage = self._stages.tasks[-1]

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` more units as finished, and print the line if it is due."""
        if self._stage is not None:
            self._stages.advance(self._stage.id, amount)
            self.print_if_due()

    def note(self, text: str) -> None:
        """End the stage, and print a line below it."""
        self._end()
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _end(self) -> None:
        self.print_progress()
        self._stage = None

    def _text(self) -> str:
        stage = self._stage
        if stage is None:
            return ""
        of_total = "" if stage.total is None else f" of {stage.total:,.0f} ({stage.percentage:.0f}%)"
        pace = f"{stage.finished_speed or stage.speed or 0:,.0f}/s"
        left = f", {duration(stage.time_remaining)} left" if stage.time_remaining else ""
        count = f"{stage.completed:,.0f}{of_total} {stage.fields['unit']}"
        return f"{stage.description}: {count}, {pace}, {duration(stage.elapsed or 0)}{left}"


# --- Stopping ---


class Stop:
    """The first Ctrl-C or SIGTERM lets calls in flight end, a second one ends the process."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.number = 0  # the signal that arrived; 0 before

    @contextlib.asynccontextmanager
    async def show(self, work: Progress, drain: Callable[[], None]) -> AsyncIterator[None]:
        """Show the progress of some work while the body runs, and call `drain` at the first signal."""

        def stop(number: int) -> None:
            self.number = number
            drain()
            self.console.print("stopping when the calls in flight have ended; press Ctrl-C again to stop now")

        with draining(stop), Display(self.console, work) as display:
            printing = asyncio.create_task(display.print_lines())
            try:
                yield
            finally:
                printing.cancel()
                # A log keeps the last line; on a terminal it was shown live.
                if not self.console.is_terminal:
                    display.print_progress()

    @contextlib.contextmanager
    def resumable(self) -> Iterator[None]:
        """End the process if the body is interrupted, after printing how to resume it."""
        try:
            yield
        except Interrupted as stopped:
            self.console.print(f"stopped; all finished work is kept. Resume with:\n  {this_command()}")
            sys.exit(128 + (self.number or stopped.number))

    def print_missing(self, causes: Mapping[str, int], finished: int, total: int, *, max_failed: float) -> int:
        """Print how many questions have no result, by cause; return 1 if more than the share `max_failed` has none."""
        failed, missing = sum(causes.values()), total - finished
        if missing:
            untried = f"{missing - failed} were not tried"
            self.console.print(printable(f"{failed} questions failed, {untried}{what_to_do(causes)}"))
        return int(missing > max_failed * total)
