"""`reproduce`: comparisons at laptop scale. Each stage is a `reasonrag` command in its own process."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import PATH, F, flag_help, out, settings, table, together


@click.group()
def reproduce() -> None:
    """Repeat the papers' comparisons at laptop scale, in the demo world, or train a real model; with intervals.

    \b
      reasonrag reproduce reasonrag --out runs/reproduce
      reasonrag reproduce real --model models/gemma-3-270m --chat-template gemma --data data --out runs/real
    """


def _count(flag: str, default: int, help: str) -> Callable[[F], F]:
    return click.option(flag, type=click.IntRange(1), default=default, show_default=True, help=help)


def _with_default(flag: str, key: str, default: int, more: str) -> Callable[[F], F]:
    """Add the flag of a setting whose default is another one here; `more` says what it means here."""
    meaning = re.split(r" \(|\. |\.$", flag_help("Config", key))[0]
    return click.option(flag, type=int, default=default, help=f"{meaning} (default: {default}). {more}")


_RESUMES = """
    Each stage is a separate command, which is printed. The same command resumes what was stopped, and may ask for more
    seeds and variants later. The page says which variants are missing.
    """


def _add_command(name: str, paper: Mapping[str, Any]) -> None:
    """Register the command of a paper, an entry of `options.json`; all take the same options."""
    variants = paper["variants"]
    text = f"""Repeat {paper["title"]}: {", ".join(variants)}; each beside the paper's rows.

    \b
    All variants, two commands at a time:
      reasonrag reproduce {name} --out runs/{name} --jobs 2
    One variant, to see it run:
      reasonrag reproduce {name} --out runs/quick --seeds 1 --only {variants[0]} \\
          --limit 20 --test-limit 20 --max-steps 2
    """
    short = f"Repeat {paper['title']}."
    inputs: list[Callable[[Any], Any]] = []
    limit, of_each = settings("Config", "questions.limit", show_keys=False), ""
    iterations = settings("Config", "search.iterations", show_keys=False)
    if not paper["in_demo_world"]:
        short = "Train a real language model on real questions, and evaluate it."
        of_each = " Of each data set."
        demonstrated = "Of each data set, to search trees of the policy; six times as many give demonstrations."
        limit = _with_default("--limit", "questions.limit", paper["questions"], demonstrated)
        twice = "Twice as many per tree of a demonstration."
        iterations = _with_default("--iterations", "search.iterations", paper["iterations"], twice)
        text = f"""Train a real model on real questions: {", ".join(variants)}, evaluated beside the model itself.

    \b
    Everything, about six hours of one CPU core for a model of 270 million parameters:
      reasonrag reproduce {name} --model models/gemma-3-270m --chat-template gemma --data data --out runs/{name}
    As few questions and steps as possible, to see it run:
      reasonrag reproduce {name} --model MODEL --data data --out runs/quick --limit 1 --iterations 1 --max-steps 1 \\
          --test-limit 1

    The folder of --data has questions/NAME.jsonl and corpus/NAME.jsonl.gz of hotpotqa, 2wikimultihopqa and musique,
    with FlashRAG's fields.
    """
        inputs = [
            click.option("--model", required=True, help=f"{flag_help('SFTSettings', 'model')} Here a folder."),
            settings("SFTSettings", "chat_template", show_keys=False),
            click.option("--data", type=PATH, required=True, help="Folder of the questions and their passages."),
        ]
    options = [
        *inputs,
        out("The folder of all stages; the same command resumes them."),
        click.option("--results", type=PATH, help="Folder of the results page (default: OUT/results)."),
        _count("--seeds", paper["seeds"], "How many random seeds; everything is trained and evaluated once for each."),
        limit,
        _count("--test-limit", paper["test_questions"], f"How many test questions.{of_each}"),
        settings("RLSettings", "max_steps", show_keys=False),
        click.option(
            "--only",
            multiple=True,
            type=click.Choice([*variants, *paper["tables"]]),
            help="Compare only this with the base policy: a variant, or all that a table asks for (repeatable).",
        ),
        _count("--jobs", 1, "Commands at a time, one thread each."),
    ]
    if paper["builds_trees"]:
        options.append(iterations)

    def run(**given: Any) -> None:
        sys.exit(_reproduce(name, **given))

    reproduce.command(name, help=text + _RESUMES, short_help=short)(together(*options)(run))


def _reproduce(
    name: str,
    *,
    out: Path,
    results: Path | None,
    seeds: int,
    limit: int | None,
    test_limit: int,
    max_steps: int | None,
    only: tuple[str, ...],
    jobs: int,
    iterations: int | None = None,
    model: str | None = None,
    data: Path | None = None,
    chat_template: str | None = None,
) -> int:
    """Run what is not done yet, then write the page of all results so far; return the exit code.

    A command that fails ends only its own variant; the page says which are missing.
    """
    from reasonrag.commands.console import error_console, log_plainly
    from reasonrag.reproduce import PAPERS
    from reasonrag.reproduce.page import write
    from reasonrag.reproduce.paper import Scale, outputs, stages
    from reasonrag.reproduce.real import RealModel, prepare
    from reasonrag.reproduce.results import evaluated, summarise
    from reasonrag.reproduce.stages import Plan

    log_plainly()
    console = error_console()
    paper = PAPERS[name]
    scale = Scale(seeds, limit, test_limit, max_steps, iterations)
    if isinstance(paper, RealModel):
        paper = replace(paper, chat_template=chat_template)
    plan = Plan(out, stages(paper, out, scale))
    if model is not None and data is not None:
        prepare(Path(model), data, out)
    asked = [name for choice in only or paper.usual for name in paper.by_table.get(choice, (choice,))]
    code = plan.run(console.print, only=outputs(paper, out, scale, asked), jobs=jobs)
    if code >= 128:
        console.print("stopped; all finished work is kept, and the same command resumes")
        return code
    rows = evaluated(paper, plan, scale)
    page = write(paper, summarise(paper, plan, scale, rows), rows, results or out / "results")
    if isinstance(paper, RealModel):
        paper.draw(plan, page.parent)
    print(f"results: {page}")
    if code:
        console.print("some commands failed, and the page lacks their results; the same command tries them again")
    return code


for _name, _paper in table()["papers"].items():
    _add_command(_name, _paper)
