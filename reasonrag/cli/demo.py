"""`demo` and `doctor`: the invented world, and what would work on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from reasonrag.cli.root import cli


@cli.group()
def demo() -> None:
    """The demo world: an invented encyclopedia and its questions.

    \b
      reasonrag demo world --out world
    """


@demo.command("world")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for questions and corpus.")
@click.option("--world-seed", type=int, default=0, show_default=True)
def demo_world(out: Path, world_seed: int) -> None:
    """Write the world as FlashRAG files: train, dev and test questions, and the corpus.

    \b
      reasonrag demo world --out world
    """
    from reasonrag.commands import search

    search.write_world(out, world_seed)


@cli.command()
def doctor() -> None:
    """Print what is installed, which backends work on this machine, and what the others need.

    \b
      reasonrag doctor
    """
    from reasonrag.pipeline.doctor import report

    click.echo(report())
