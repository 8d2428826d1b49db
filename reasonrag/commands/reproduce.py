"""`reproduce`: the papers' comparisons at laptop scale. Each stage is a `reasonrag` command in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import PATH, F, settings, table

_TABLE_3 = "reasonrag"  # compares training signals for trees; every other paper compares rewards of `rl train`


@click.group()
def reproduce() -> None:
    """Repeat the papers' comparisons at laptop scale, in the demo world, with intervals.

    \b
      reasonrag reproduce reasonrag --out runs/reproduce
    """


def _scale(paper: Mapping[str, Any]) -> Callable[[F], F]:
    """Add the options that all comparisons have; `paper` is an entry of `options.json`."""

    def decorate(function: F) -> F:
        options = (
            click.option("--out", type=PATH, required=True, help="Folder of all stages; the same command resumes it."),
            click.option("--results", type=PATH, help="Folder of the results page (default: OUT/results)."),
            click.option(
                "--seeds",
                type=click.IntRange(1),
                default=paper["seeds"],
                show_default=True,
                help="How many random seeds; everything is trained and evaluated once for each.",
            ),
            settings("Config", "questions.limit", show_keys=False),
            click.option(
                "--test-limit",
                type=click.IntRange(1),
                default=paper["test_questions"],
                show_default=True,
                help="How many test questions.",
            ),
            settings("RLSettings", "max_steps", show_keys=False),
            click.option(
                "--only",
                multiple=True,
                type=click.Choice(paper["variants"]),
                help="Compare only this variant with the base policy (repeatable).",
            ),
        )
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@reproduce.command(_TABLE_3)
@_scale(table()["papers"][_TABLE_3])
@settings("Config", "search.iterations", show_keys=False)
def reproduce_reasonrag(
    out: Path,
    results: Path | None,
    seeds: int,
    limit: int | None,
    iterations: int | None,
    test_limit: int,
    max_steps: int | None,
    only: tuple[str, ...],
) -> None:
    """Repeat Table 3: base, SFT, outcome pairs, no shortest-path term, judge values, rollout values; equal calls.

    \b
    In an hour on two cores:
      reasonrag reproduce reasonrag --out runs/reproduce
    In a few minutes, to see it run:
      reasonrag reproduce reasonrag --out runs/quick --seeds 1 --limit 60 --test-limit 100 --max-steps 20

    Each stage is a separate command, which is printed. The same command resumes what was stopped.
    """
    from reasonrag.commands.console import error_console, log_plainly
    from reasonrag.reproduce.reasonrag import Scale, stages
    from reasonrag.reproduce.report import summarise, write
    from reasonrag.reproduce.stages import Plan

    default = Scale()
    scale = Scale(seeds, limit or default.questions, iterations or default.iterations, test_limit, max_steps, only)
    log_plainly()
    console = error_console()
    if code := Plan(out, stages(out, scale)).run(console.print):
        console.print("stopped; all finished work is kept, and the same command resumes")
        sys.exit(code)
    print(f"results: {write(summarise(out, scale), results or out / 'results')}")


def _ablations(name: str, entry: Mapping[str, Any]) -> None:
    """Register the command of a paper whose variants are rewards of `rl train`."""
    variants = entry["variants"]
    text = f"""Repeat {entry["title"]}: {", ".join(variants)}; each beside the paper's rows.

    \b
    All variants, two training runs at a time:
      reasonrag reproduce {name} --out runs/{name} --jobs 2
    Some variants, to see it run:
      reasonrag reproduce {name} --out runs/quick --seeds 1 --only {variants[0]} \\
          --limit 20 --test-limit 20 --max-steps 2

    Each stage is a separate command, which is printed. The same command resumes what was stopped, and may ask for more
    seeds later. The page says which variants are missing.
    """

    @reproduce.command(name, help=text, short_help=f"Repeat {entry['title']}.")
    @_scale(entry)
    @click.option(
        "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Commands at a time, one thread each."
    )
    def command(
        out: Path,
        results: Path | None,
        seeds: int,
        limit: int | None,
        test_limit: int,
        max_steps: int | None,
        only: tuple[str, ...],
        jobs: int,
    ) -> None:
        from reasonrag.reproduce.ablation import AblationScale
        from reasonrag.reproduce.papers import PAPERS

        scale = AblationScale(seeds, limit, test_limit, max_steps)
        sys.exit(ablations(PAPERS[name], out, results or out / "results", scale, only=only, jobs=jobs))


def ablations(paper: Any, out: Path, results: Path, scale: Any, *, only: tuple[str, ...] = (), jobs: int = 1) -> int:
    """Run what is not done yet of some variants (default: all), then write the page of all results so far.

    A command that fails ends only its own variant; the page says which are missing. Return the exit code.
    """
    from reasonrag.commands.console import error_console, log_plainly
    from reasonrag.reproduce import ablation
    from reasonrag.reproduce.ablation_figures import summarise
    from reasonrag.reproduce.ablation_page import write
    from reasonrag.reproduce.stages import Plan

    log_plainly()
    console = error_console()
    plan = Plan(out, ablation.stages(paper, out, scale), grows=True)
    outs = ablation.outs(paper, out, scale, only or paper.names)
    code = plan.run(console.print, only=outs, jobs=jobs, keep_going=True)
    if code >= 128:
        console.print("stopped; all finished work is kept, and the same command resumes")
        return code
    print(f"results: {write(paper, summarise(paper, plan, out, scale), results)}")
    if code:
        console.print("some commands failed, and the page lacks their results; the same command tries them again")
    return code


for _name, _entry in table()["papers"].items():
    if _name != _TABLE_3:
        _ablations(_name, _entry)

COMMANDS = {"reproduce": reproduce}
