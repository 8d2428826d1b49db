"""What running work shows: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from reasonrag.core.text import printable

_PLAIN_EVERY_S = 10.0


class Watched(Protocol):
    """Work that can say how far it is."""

    @property
    def total(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def eta_s(self) -> float | None: ...
    def line(self) -> str: ...


class Panel:
    """Renders progress; rich asks again several times a second."""

    def __init__(self, progress: Watched) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar, and the figures below it."""
        progress = self.progress
        grid = Table.grid()
        grid.add_row(ProgressBar(total=max(progress.total, 1), completed=progress.done + progress.failed, width=60))
        grid.add_row(line(progress))
        yield grid


def line(progress: Watched) -> str:
    """What it says, and the time left."""
    left = "" if progress.eta_s is None else f", {duration(progress.eta_s)} left"
    return progress.line() + left


def duration(seconds: float) -> str:
    """A length of time for people.

    >>> duration(75), duration(7300)
    ('1 min 15 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.asynccontextmanager
async def shown(progress: Watched, console: Console) -> AsyncIterator[None]:
    """Show how far the work is while the body runs."""
    if console.is_terminal:
        with Live(Panel(progress), console=console, refresh_per_second=4, transient=True):
            yield
        return
    ticker = asyncio.create_task(_tick(progress, console))
    try:
        yield
    finally:
        ticker.cancel()
        console.print(line(progress), markup=False, highlight=False, soft_wrap=True)


async def _tick(progress: Watched, console: Console) -> None:
    while True:
        await asyncio.sleep(_PLAIN_EVERY_S)
        console.print(line(progress), markup=False, highlight=False, soft_wrap=True)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures of `run.json` that a person wants to see at the end."""
    table = Table(title="build-tree", show_header=False, title_justify="left")
    for name, value in _figures(summary):
        table.add_row(name, value)
    return table


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    questions, trees, pairs = summary["questions"], summary["trees"], summary["pairs"]
    yield "questions", f"{questions['finished']} of {questions['total']}"
    for cause, count in questions["failed"].items():
        yield f"  failed: {cause}", str(count)
    yield "nodes", str(trees["nodes"])
    yield "complete trajectories", str(trees["complete_trajectories"])
    if trees["mean_f1"] is not None:
        yield "  mean F1, EM", f"{trees['mean_f1']:.3f}, {trees['mean_em']:.3f}"
    if trees["iterations_without_value"]:
        yield "iterations without a value", str(trees["iterations_without_value"])
    yield "pairs", f"{pairs['total']} (train {pairs['train']}, test {pairs['test']})"
    for kind, count in pairs["by_type"].items():
        yield f"  {kind}", str(count)
    for kind, used in summary["calls"].items():
        yield f"{kind} calls", str(used["calls"])
        if used.get("prompt_tokens") or used.get("completion_tokens"):
            yield "  tokens", f"{used['prompt_tokens']} in, {used['completion_tokens']} out"
        if used.get("cost") is not None:
            yield "  cost", f"{used['cost']:.2f}"
    yield "seconds", f"{summary['seconds']:.1f}"


class StageLines:
    """The stages of a build (a `BuildProgress`): a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _bar(console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._stage = _Stage("", None, "", 0.0)

    def __enter__(self) -> StageLines:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """A stage begins, with `done` of `total` units behind it; total None is unknown."""
        self._end()
        self._stage = _Stage(what, total, unit, done)
        if self._bar is not None:
            self._task = self._bar.add_task(f"{what} ({unit})", total=total, completed=int(done))

    def advance(self, amount: float = 1.0) -> None:
        """So many more units are done."""
        stage = self._stage
        stage.done += amount
        stage.moved_at = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, amount)
        elif stage.what and time.monotonic() - stage.told_at >= _PLAIN_EVERY_S:
            stage.told_at = time.monotonic()
            self._print(stage.line())

    def note(self, text: str) -> None:
        """A line that stays, below that of the stage that it ends."""
        self._end()
        self._print(text)

    def _end(self) -> None:
        """The line of a stage that is left, which stays."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._stage.what:
            self._print(self._stage.line())
            self._stage = _Stage("", None, "", 0.0)

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class _Stage:
    """How far a stage is, and how long it may take."""

    def __init__(self, what: str, total: float | None, unit: str, done: float) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self._before = done
        self.began_at = self.told_at = self.moved_at = time.monotonic()

    def line(self) -> str:
        """Units, share, rate and time left."""
        complete = self.total is not None and self.done >= self.total
        seconds = (self.moved_at if complete else time.monotonic()) - self.began_at
        rate = (self.done - self._before) / seconds if seconds > 0 else 0.0
        of = "" if self.total is None else f" of {self.total:,.0f} ({self.done / max(self.total, 1):.0%})"
        text = f"{self.what}: {self.done:,.0f}{of} {self.unit}, {rate:,.0f}/s, {duration(seconds)}"
        if self.total is None or rate == 0 or complete:
            return text
        return f"{text}, {duration((self.total - self.done) / rate)} left"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f}", markup=False),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
