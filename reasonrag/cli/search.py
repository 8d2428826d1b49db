"""`build-tree`, `pairs` and `parse`: trees, what is derived of them, and trajectories of anybody."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reasonrag import flags
from reasonrag.cli.root import cli
from reasonrag.core.config import Config
from reasonrag.core.settings import dump
from reasonrag.core.text import Rules, printable
from reasonrag.formats import FORMATS


@cli.command("build-tree")
@flags.DATA
@flags.MODELS
@flags.SEARCH
@flags.PAIRS
@flags.EXECUTION
@flags.CONFIG
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder; the same command resumes it.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and an estimate; call nothing.")
@click.option("--preview", is_flag=True, help="Build the first question's tree and print it.")
def build_tree(
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    out: Path | None,
    dry_run: bool,
    preview: bool,
    **given: Any,
) -> None:
    """Search trees over agentic-RAG steps, value them by SPRE, write preference pairs as Parquet.

    \b
    Your own files, no GPU:
      reasonrag build-tree --dataset questions.jsonl --corpus corpus.jsonl.gz --policy extractive --out runs/try
    A model on a vLLM server:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy http://127.0.0.1:8000/v1 \\
          --model Qwen/Qwen2.5-7B-Instruct --set policy.vllm=true --out runs/hotpot
    What it would cost:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy ... --input-price 0.1 --output-price 0.4 --dry-run

    Killed or stopped, the same command goes on where it was.
    """
    from reasonrag.commands import search

    config = flags.resolve(preset, file, assignments, given)
    if dry_run:
        click.echo(printable(dump(config)))
        click.echo(printable(search.estimate(config)))
        return
    if preview:
        search.preview(config, out)
        return
    sys.exit(search.build_tree(config, out))


@cli.command()
@flags.PAIRS
@flags.setting(Config, "--alpha", "pairs.alpha", type=float)
@flags.setting(Config, "--level", "pairs.level", type=click.Choice(["step", "trajectory"]))
@click.option("--out", type=click.Path(path_type=Path), help="Write there and leave the run as it is.")
@click.argument("run", type=click.Path(path_type=Path))
def pairs(run: Path, out: Path | None, **given: Any) -> None:
    """Derive a finished run's pairs anew, with no model call.

    \b
      reasonrag pairs runs/hotpot --min-margin 0.05
    Without the shortest-path term, beside the run:
      reasonrag pairs runs/hotpot --alpha 1 --out runs/hotpot-alpha1
    """
    from reasonrag.commands import search

    search.derive(run, out, flags.overrides(given))


@cli.command()
@click.option(
    "--format", "name", type=click.Choice(list(FORMATS)), required=True, help="How the trajectories are written."
)
@click.option(
    "--rules",
    type=click.Choice(["house", "flashrag"]),
    default="house",
    show_default=True,
    help="Of EM and F1, where there are golden answers.",
)
@click.argument("file")
def parse(name: str, rules: Rules, file: str) -> None:
    """Read anybody's trajectories: a row of JSON each, and counts by what is wrong.

    FILE is JSONL(.gz) with `text` and perhaps `golden_answers`; - reads standard input.

    \b
      reasonrag parse --format search_r1 trajectories.jsonl.gz > read.jsonl
    """
    from reasonrag.commands import parse as command

    sys.exit(command.parse(name, file, rules=rules))
