"""`demo` and `doctor`: the invented world, and what would work on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from reasonrag.cli.root import cli


@cli.group()
def demo() -> None:
    """The demo world: an invented encyclopedia, its questions, and a tiny policy.

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


@demo.command("policy")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for model and tokenizer.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--formats",
    type=click.Choice(["reasonrag", "stream"]),
    default="reasonrag",
    show_default=True,
    help="stream: one policy for the four formats of a growing turn, from the weights of the other.",
)
def demo_policy(out: Path, seed: int, formats: str) -> None:
    """Train a tiny policy (a quarter of an hour on one core).

    \b
      reasonrag demo policy --out policy --seed 0
      reasonrag build-tree --preset demo --policy hf:policy --out runs/own
    """
    from reasonrag.demo.train import train_policy, train_stream_policy

    (train_stream_policy if formats == "stream" else train_policy)(out, seed=seed, log=click.echo)


@cli.command()
def doctor() -> None:
    """What is installed, which backends would work here, and why the others would not.

    \b
      reasonrag doctor
    """
    from reasonrag.pipeline.doctor import report

    click.echo(report())
