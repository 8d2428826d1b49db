"""`reproduce`."""

from __future__ import annotations

from pathlib import Path

from reasonrag.commands.shell import error_console, log_plainly
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
