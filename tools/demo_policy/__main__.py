"""Command line of `python -m tools.demo_policy`."""

from __future__ import annotations

from pathlib import Path

import click

from tools.demo_policy.train import train_policy, train_stream_policy


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Output folder for model and tokenizer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for weights and training data.")
@click.option(
    "--formats",
    type=click.Choice(["reasonrag", "stream"]),
    default="reasonrag",
    show_default=True,
    help="stream: one policy for the four formats of one growing turn, initialised from the shipped reasonrag policy.",
)
def main(out: Path, seed: int, formats: str) -> None:
    """Train a tiny policy for the demo world (about a quarter of an hour on one core).

    \b
      python -m tools.demo_policy --out policy --seed 0
      reasonrag build-tree --preset demo --policy hf:policy --out runs/own
    """
    train = train_stream_policy if formats == "stream" else train_policy
    train(out, seed=seed, log=click.echo)


if __name__ == "__main__":
    main()
