"""What a running build shows: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from reasonrag.build import Build

_PLAIN_EVERY_S = 10.0


class Panel:
    """Renders a build's progress; rich asks again several times a second."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar, and the figures below it."""
        progress = self.build.progress
        grid = Table.grid()
        grid.add_row(ProgressBar(total=max(progress.total, 1), completed=progress.done + progress.failed, width=60))
        grid.add_row(line(self.build))
        yield grid


def line(build: Build) -> str:
    """Counts, rate, tokens, cost and time left, in one line."""
    progress = build.progress
    rate = progress.calls / max(progress.seconds, 1e-9)
    prompt = sum(model.prompt_tokens for model in progress.models)
    written = sum(model.completion_tokens for model in progress.models)
    parts = [
        f"{progress.done}/{progress.total} questions",
        f"{progress.failed} failed",
        f"{progress.nodes} nodes",
        f"{progress.pairs} pairs",
        f"{progress.calls} calls ({rate:.0f}/s)",
        f"{prompt + written} tokens",
    ]
    if (cost := _cost(build)) is not None:
        parts.append(f"cost {cost:.2f}")
    if progress.eta_s is not None:
        parts.append(f"{duration(progress.eta_s)} left")
    return ", ".join(parts)


def _cost(build: Build) -> float | None:
    """What this process has spent; None where a price is unknown."""
    prices = build.config.prices
    costs = [prices[m.kind].cost(m.prompt_tokens, m.completion_tokens) for m in build.progress.models]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


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
async def shown(build: Build, console: Console) -> AsyncIterator[None]:
    """Show the build's progress while the body runs."""
    if console.is_terminal:
        with Live(Panel(build), console=console, refresh_per_second=4, transient=True):
            yield
        return
    ticker = asyncio.create_task(_tick(build, console))
    try:
        yield
    finally:
        ticker.cancel()
        console.print(line(build), markup=False, highlight=False, soft_wrap=True)


async def _tick(build: Build, console: Console) -> None:
    while True:
        await asyncio.sleep(_PLAIN_EVERY_S)
        console.print(line(build), markup=False, highlight=False, soft_wrap=True)


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
