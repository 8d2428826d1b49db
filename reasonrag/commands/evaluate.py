"""`eval`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from reasonrag.commands.progress import shown
from reasonrag.commands.shell import Stop, error_console, log_plainly, table_console
from reasonrag.core.errors import Interrupted
from reasonrag.core.text import printable

if TYPE_CHECKING:
    from reasonrag.evaluation.run import Evaluation


def evaluate(evaluation: Evaluation) -> int:
    """Run the evaluation with a progress line and print its results; return the exit code."""
    from reasonrag.evaluation.report import summary_table

    log_plainly()
    stop = Stop(error_console())

    @contextlib.asynccontextmanager
    async def show(work: Evaluation) -> AsyncIterator[None]:
        async with stop.heeded(work.drain), shown(work.progress, stop.console):
            yield

    try:
        figures = evaluation.run(show)
    except Interrupted:
        return stop.say_how_to_go_on()
    table_console().print(summary_table(figures))
    print(f"report: {evaluation.out / 'report.md'}")
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
