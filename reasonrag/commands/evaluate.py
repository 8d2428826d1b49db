"""`eval`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.commands.progress import shown
from reasonrag.commands.shell import Stop, error_console, log_plainly, table_console
from reasonrag.core.config import Config
from reasonrag.core.errors import Interrupted
from reasonrag.core.text import Rules, printable

if TYPE_CHECKING:
    from reasonrag.evaluation.judged import Judging
    from reasonrag.evaluation.run import Evaluation


def evaluate(
    configs: Mapping[str, Config],
    out: Path,
    temperatures: Sequence[float],
    max_steps: Sequence[int] | None,
    top_ks: Sequence[int] | None,
    rules: Rules,
    judging: Judging | None = None,
) -> int:
    """Run, report, and say where it is; returns the exit code."""
    from reasonrag import evaluation
    from reasonrag.evaluation.report import summary_table

    log_plainly()
    stop = Stop(error_console())

    @contextlib.asynccontextmanager
    async def show(work: Evaluation) -> AsyncIterator[None]:
        async with stop.heeded(work.drain), shown(work.progress, stop.console):
            yield

    try:
        figures = evaluation.evaluate(
            configs,
            out,
            temperatures=temperatures,
            max_steps=max_steps,
            top_ks=top_ks,
            rules=rules,
            judging=judging,
            show=show,
        )
    except Interrupted:
        return stop.say_how_to_go_on()
    table_console().print(summary_table(figures))
    print(f"report: {out / 'report.md'}")
    for told in figures["asked_differently"]:
        stop.console.print(printable(told))
    for missing in figures["incomplete"]:
        stop.console.print(
            f"{missing['missing']} questions are missing of {missing['policy']} at {missing['setting']}; "
            "the same command tries them again"
        )
    for failed in figures["unjudged"]:
        stop.console.print(
            f"{failed['failed']} of {failed['asked']} verdicts failed for {failed['metric']} of {failed['policy']} at "
            f"{failed['setting']}; the same command tries again those that the judge did not answer"
        )
    return int(bool(figures["incomplete"] or figures["unjudged"]))
