"""Repeat a paper's comparison: `python -m papers PAPER --out FOLDER`.

The comparisons run in the demo world with tiny models, except `real`, which trains a real model on real questions:

    python -m papers reasonrag --out runs/table3
    python -m papers hiprag --out runs/quick --seeds 1 --only lp-0.4 --limit 20 --test-limit 20 --max-steps 2
    python -m papers real --model models/gemma-3-270m --chat-template gemma --data data --out runs/real

Each stage is a separate `reasonrag` command, which is printed. The same command resumes a stopped comparison, and may
ask for more seeds and variants. The page in `OUT/results` has the results so far and names the missing variants.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from papers import PAPERS
from papers.comparison import outputs, stages
from papers.measures import read_values
from papers.page import write, write_page
from papers.plan import ADDRESS, Plan
from papers.real import prepare
from papers.results import evaluated, renewed, summarise
from reasonrag.core.errors import ReasonRAGError
from reasonrag.storage.files import require_json

PATH = click.Path(path_type=Path)


@click.command(help=(__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))
@click.argument("paper", type=click.Choice(list(PAPERS)))
@click.option("--out", type=PATH, help="Folder of all stages.")
@click.option("--results", type=PATH, help="Folder of the results page (default: OUT/results).")
@click.option("--renew", type=PATH, help="Write the page in this folder again from its JSON and values; run nothing.")
@click.option("--seeds", type=click.IntRange(1), help="Random seeds; every variant is trained once for each.")
@click.option("--first-seed", type=click.IntRange(0), help="Run no seed before it; --results has their values.")
@click.option("--limit", "questions", type=click.IntRange(1), help="Training questions.")
@click.option("--test-limit", "test_questions", type=click.IntRange(1), help="Test questions.")
@click.option("--max-steps", type=click.IntRange(1), help="Optimizer steps.")
@click.option("--iterations", type=click.IntRange(1), help="MCTS iterations per tree.")
@click.option("--only", multiple=True, help="Compare only this variant, or the variants of this table (repeatable).")
@click.option("--model", type=PATH, help="real: folder of the model.")
@click.option("--data", type=PATH, help="real: folder with questions/NAME.jsonl and corpus/NAME.jsonl.gz.")
@click.option("--chat-template", help="real: chat template of a base model that has none.")
@click.option("--serve", help=f"real: command that serves the folder {{model}} at {ADDRESS}, for whatever acts.")
def main(
    paper: str,
    out: Path | None,
    results: Path | None,
    renew: Path | None,
    only: tuple[str, ...],
    model: Path | None,
    data: Path | None,
    chat_template: str | None,
    serve: str | None,
    **scale: int | None,
) -> None:
    """Run the stages that are not done yet, then write the page; the exit code is that of the first failed command."""
    comparison = PAPERS[paper]
    if renew is not None:
        stored = require_json(renew / f"{comparison.page}.json", "name the folder of a page")
        found = renewed(comparison, stored, read_values(renew / f"{comparison.page}.values.csv.gz"))
        print(f"results: {write_page(comparison, found, renew)}")
        return
    if out is None:
        raise click.UsageError("give --out FOLDER, or --renew FOLDER")
    given: dict[str, Any] = {name: value for name, value in scale.items() if value is not None}
    size = replace(comparison.scale, **given)
    if unknown := set(only) - {*comparison.names, *comparison.by_table}:
        raise click.BadParameter(f"{paper} has no {', '.join(unknown)}; known: {', '.join(comparison.names)}")
    if not comparison.in_demo_world:
        comparison = replace(comparison, chat_template=chat_template, is_served=serve is not None)
    plan = Plan(out, stages(comparison, out, size), serve)
    if not comparison.in_demo_world:
        if model is None or data is None:
            raise click.UsageError("real needs --model and --data")
        prepare(model, data, out)
    names = [name for choice in only or comparison.usual for name in comparison.by_table.get(choice, (choice,))]
    code = plan.run(lambda line: print(line, file=sys.stderr), only=outputs(comparison, out, size, names))
    if code < 128:
        folder = results or out / "results"
        rows = evaluated(comparison, plan, size, folder / f"{comparison.page}.values.csv.gz")
        page = write(comparison, summarise(comparison, plan, size, rows), rows, folder)
        print(f"results: {page}")
    sys.exit(code)


def run() -> None:
    """Run `main`; report an error that the user can fix in one line."""
    try:
        main(prog_name="python -m papers")
    except ReasonRAGError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
