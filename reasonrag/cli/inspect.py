"""`report`, `show`, `stats`, `graph`: look at a run; `export`, `import`: its data for other tools, and theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from reasonrag.cli.root import cli

RUN = click.argument("run", type=click.Path(path_type=Path))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="A folder; FOLDER/report if not given.")
@click.option("--open", "in_browser", is_flag=True, help="Show it in a browser.")
def report(folder: Path, out: Path | None, in_browser: bool) -> None:
    """A run, a training or an evaluation as pages that open from disk.

    \b
    A run: what was run, its figures, every question and its tree:
      reasonrag report runs/hotpot --open
    A training: its curves and, of `rl train`, every rollout with what it earned and why:
      reasonrag report policies/rl
    An evaluation: policies compared, and where each question parts them:
      reasonrag report reports/hotpot
    """
    from reasonrag.commands import inspect

    inspect.report(folder, out, in_browser=in_browser)


@cli.command()
@RUN
@click.option("--question", required=True, help="Its id.")
@click.option("--dataset", help="Where two data sets have a question of that id.")
def show(run: Path, question: str, dataset: str | None) -> None:
    """Print the tree of one question: visits, values, SPRE, the best path.

    \b
      reasonrag show runs/hotpot --question 5a8b57f25542995d1e6f1371
    """
    from reasonrag.commands import inspect

    inspect.show(run, question, dataset)


@cli.command()
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(run: Path, as_json: bool) -> None:
    """What a run holds: nodes, pairs by type and depth, margins, lengths, calls, cost, failures.

    \b
      reasonrag stats runs/hotpot
    """
    from reasonrag.commands import inspect

    inspect.stats(run, as_json=as_json)


@cli.command()
@RUN
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="A folder for graphml, a file for node-link."
)
@click.option("--form", type=click.Choice(["graphml", "node-link"]), default="graphml", show_default=True)
@click.option("--question", "questions", multiple=True, help="Its id (repeatable); all of them if none.")
def graph(run: Path, out: Path, form: Literal["graphml", "node-link"], questions: tuple[str, ...]) -> None:
    """Write trees for other tools, each checked to be a tree.

    \b
    For Gephi, yEd, Cytoscape, networkx.read_graphml:
      reasonrag graph runs/hotpot --out graphs
    For networkx.node_link_graph, a line a question:
      reasonrag graph runs/hotpot --form node-link --out trees.jsonl
    """
    from reasonrag.commands import inspect

    inspect.graph(run, out, form, questions)


@cli.command()
@RUN
@click.option("--to", "form", type=click.Choice(["llamafactory", "verl", "jsonl"]), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder.")
def export(run: Path, form: str, out: Path) -> None:
    """Hand a run's data to other tools. TRL reads RUN/pairs as it is.

    \b
    Preference files and dataset_info.json for LLaMA-Factory:
      reasonrag export runs/hotpot --to llamafactory --out data
    Questions as verl and Search-R1 read them for RL:
      reasonrag export runs/hotpot --to verl --out data
    """
    from reasonrag.commands import inspect

    inspect.export(run, form, out)


@cli.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--from", "form", type=click.Choice(["proguide", "trl"]), required=True)
@click.option("--test", type=click.Path(path_type=Path), help="Held-out rows of the same fields.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder that `dpo train --data` reads.")
def import_(source: Path, form: str, test: Path | None, out: Path) -> None:
    """Take over preferences that others made; what they do not say stays empty.

    \b
      reasonrag import RAG_ProGuide.json --from proguide --out data/proguide
      reasonrag dpo train --data data/proguide --model Qwen/Qwen2.5-7B-Instruct --out policies/proguide
    """
    from reasonrag.commands import inspect

    inspect.import_(source, form, test, out)
