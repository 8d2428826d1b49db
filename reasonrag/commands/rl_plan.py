"""`rl plan`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from rich.table import Table

from reasonrag.commands.progress import shown
from reasonrag.commands.shell import Stop, error_console, log_plainly, table_console
from reasonrag.core.config import Config
from reasonrag.core.errors import Interrupted, RunError
from reasonrag.formats import PromptSet
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.pipeline.models import open_llm
from reasonrag.pipeline.parts import Checkable, judge_service, open_questions
from reasonrag.pipeline.progress import Progress
from reasonrag.rewards.reference_plans import Correct, Made, make_plans
from reasonrag.storage.files import lock
from reasonrag.storage.journal import Journal


def plan(config: Config, out: Path, *, k: int, correct: Correct = "em", show_answer: bool = False) -> int:
    """Make reference plans for Search-P1, and say where they are; returns the exit code.

    Every reply is kept in a journal beside the file before it is used, by its content: the same command goes on after a
    kill, and another `k` or other questions pay only for what is new.
    """
    log_plainly()
    stop = Stop(error_console())
    questions = open_questions(config)
    journal_path = out.with_name(f"{out.name}.journal.sqlite")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(21, "is a folder")
    except OSError as error:
        raise RunError(f"{out} cannot hold plans ({error.strerror}); choose another file for --out") from error
    make = partial(
        make_plans,
        questions,
        k=k,
        out=out,
        concurrency=config.run.concurrency,
        correct=correct,
        show_answer=show_answer,
        max_failed=config.run.max_failed,
    )
    progress = Progress(len(questions), label="reference plans")
    with lock(out.with_name(f".{out.name}.lock")), contextlib.closing(Journal(journal_path)) as journal:
        try:
            made = asyncio.run(_make(make, config, journal, progress, stop))
        except Interrupted:
            return stop.say_how_to_go_on()
    table_console().print(_table(made, len(questions), progress))
    print(f"plans: {out}")
    missing = made.failed + made.untried
    if missing:
        stop.console.print(f"{made.failed} questions failed, {made.untried} were not tried; the same command goes on")
    return int(missing > config.run.max_failed * len(questions))


async def _make(
    make: Callable[..., Awaitable[Made]], config: Config, journal: Journal, progress: Progress, stop: Stop
) -> Made:
    """Open the judge, and let `make` plan with it."""
    model = open_llm(config.judge, "judge")
    journaled = JournaledLLM(model, journal, kind="judge")
    progress.open(journaled, config.judge)
    judge = judge_service(journaled, config.judge, PromptSet.find(config.format.prompts))

    try:
        if isinstance(model, Checkable):
            await model.check()
        async with stop.heeded(journal.drain), shown(progress, stop.console):
            return await make(judge=judge, counts=progress)
    finally:
        await model.aclose()


def _table(made: Made, questions: int, progress: Progress) -> Table:
    """What a person wants to see at the end."""
    table = Table(title="rl plan", show_header=False, title_justify="left")
    table.add_row("plans", f"{made.plans} of {questions} questions")
    for cause, count in sorted(made.without.items()):
        table.add_row(f"  without: {cause}", str(count))
    table.add_row("judge calls of this process", str(progress.calls))
    table.add_row("  tokens", str(progress.tokens))
    if progress.cost is not None:
        table.add_row("  cost", f"{progress.cost:.2f}")
    table.add_row("seconds", f"{progress.seconds:.1f}")
    return table
