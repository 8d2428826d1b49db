"""`reproduce`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from reasonrag.commands.shell import error_console, log_plainly
from reasonrag.reproduce.ablation import AblationScale, Paper
from reasonrag.reproduce.reasonrag import Scale, stages
from reasonrag.reproduce.stages import Plan


def reasonrag(out: Path, results: Path, scale: Scale) -> int:
    """Run what is not done yet, then write the page; returns the exit code."""
    from reasonrag.reproduce.report import summarise, write

    log_plainly()
    console = error_console()
    if code := Plan(out, stages(out, scale)).run(console.print):
        console.print("stopped; what is done is kept, the same command goes on")
        return code
    print(f"results: {write(summarise(out, scale), results)}")
    return 0


def ablations(
    paper: Paper, out: Path, results: Path, scale: AblationScale, *, only: Collection[str] = (), jobs: int = 1
) -> int:
    """Run what is not done yet of some variants (of all if none is named), then write the page of all that is there.

    A command that fails ends only its own variant; the page says which are missing. Returns the exit code.
    """
    from reasonrag.reproduce import ablation
    from reasonrag.reproduce.ablation_figures import summarise
    from reasonrag.reproduce.ablation_page import write

    log_plainly()
    console = error_console()
    plan = Plan(out, ablation.stages(paper, out, scale), grows=True)
    wanted = ablation.outs(paper, out, scale, only or paper.names)
    code = plan.run(console.print, only=wanted, jobs=jobs, keep_going=True)
    if code >= 128:
        console.print("stopped; what is done is kept, the same command goes on")
        return code
    print(f"results: {write(paper, summarise(paper, plan, out, scale), results)}")
    if code:
        console.print("some commands failed, and the page is without what they make; the same command tries them again")
    return code
