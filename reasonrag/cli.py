"""Flags to configuration to one function per command.

Exit codes: 0; 2 for bad input; 1 when more than `--max-failed` of the questions failed; 130 after Ctrl-C, 143 after
SIGTERM, both with everything paid for kept.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from reasonrag import __version__
from reasonrag.config import PRESETS, Config, load_config
from reasonrag.errors import ReasonRAGError
from reasonrag.settings import dump, parse_assignment
from reasonrag.text import printable

F = TypeVar("F", bound=Callable[..., Any])


def setting(flag: str, key: str, help: str, **kwargs: Any) -> Callable[[F], F]:
    """A flag that overrides one configuration key."""
    return click.option(flag, key.replace(".", "__"), help=f"{help}  [{key}]", default=None, **kwargs)


def settings(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options in the order in which `--help` shall show them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_DATA = settings(
    setting("--dataset", "questions.dataset", "hotpotqa, 2wikimultihopqa, musique, popqa, ...; demo; or a file."),
    setting("--split", "questions.split", "Split of a named data set."),
    setting("--limit", "questions.limit", "A seeded sample of this many questions.", type=int),
    setting("--world-seed", "questions.world_seed", "Which demo world.", type=int),
    setting("--corpus", "retrieval.corpus", "JSONL(.gz) or Parquet with id and contents."),
    setting("--retriever-url", "retrieval.url", "A server that speaks POST /retrieve (repeatable).", multiple=True),
    setting("--top-k", "retrieval.top_k", "Passages per search.", type=int),
)
_MODELS = settings(
    setting(
        "--policy",
        "policy.spec",
        "http://HOST:PORT/v1, hf:NAME_OR_PATH, vllm:NAME, demo, extractive.",
        envvar="REASONRAG_POLICY",
        show_envvar=True,
    ),
    setting("--model", "policy.model", "The model's name at the server.", envvar="REASONRAG_MODEL", show_envvar=True),
    setting("--temperature", "policy.temperature", "Of the policy.", type=float),
    setting("--max-tokens", "policy.max_tokens", "Of one step.", type=int),
    setting("--judge", "judge.spec", "The judge; the policy if not given."),
    setting("--judge-model", "judge.model", "The judge's name at its server."),
    setting("--prompts", "format.prompts", "default, brief, or a folder."),
)
_SEARCH = settings(
    setting("--seed", "seed", "Same seed, same rows.", type=int),
    setting("--iterations", "search.iterations", "Visits to the root of a tree.", type=int),
    setting("--max-children", "search.max_children", "Per node.", type=int),
    setting("--selection", "search.selection", "Eq. 5 or UCB1.", type=click.Choice(["puct", "ucb1"])),
    setting("--value", "value.kind", "Eq. 1 or Eq. 6.", type=click.Choice(["rollout", "judge"])),
    setting("--rollouts", "value.rollouts", "Completions per new node, k of Eq. 1.", type=int),
    setting("--alpha", "value.alpha", "Decay per action.", type=float),
    setting("--max-steps", "format.max_steps", "Actions of a trajectory; the last one has to answer.", type=int),
)
_PAIRS = settings(
    setting("--min-margin", "pairs.min_margin", "Smallest difference of rewards.", type=float),
    setting("--reward", "pairs.reward", "What pairs compare.", type=click.Choice(["spre", "judge"])),
    setting("--test-share", "pairs.test_share", "Share of questions held out.", type=float),
)
_EXECUTION = settings(
    setting("--concurrency", "run.concurrency", "Questions in work at a time.", type=int),
    setting("--max-failed", "run.max_failed", "Share of failed questions above which the run fails.", type=float),
    setting("--input-price", "policy.input_price", "Of the policy, per million tokens.", type=float),
    setting("--output-price", "policy.output_price", "Of the policy, per million tokens.", type=float),
)
_CONFIG = settings(
    click.option("--preset", type=click.Choice(sorted(PRESETS)), help="A published or shipped set of settings."),
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML; flags override it."),
    click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any other setting (repeatable)."),
)


def resolve(preset: str | None, file: Path | None, assignments: tuple[str, ...], flags: dict[str, Any]) -> Config:
    """Defaults, then the preset, then the file, then `--set`, then flags."""
    overrides = dict(map(parse_assignment, assignments))
    overrides |= {name.replace("__", "."): value for name, value in flags.items() if value not in (None, ())}
    return load_config(preset=preset, file=file, overrides=overrides)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Process rewards for agentic RAG: questions and a corpus in, preference data and policies out.

    \b
    Try it whole, without a GPU or a network:
      reasonrag build-tree --preset demo --limit 20 --out runs/demo
    """


@cli.command("build-tree")
@_DATA
@_MODELS
@_SEARCH
@_PAIRS
@_EXECUTION
@_CONFIG
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
    **flags: Any,
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
    from reasonrag import commands

    config = resolve(preset, file, assignments, flags)
    if dry_run:
        click.echo(printable(dump(config)))
        click.echo(printable(commands.estimate(config)))
        return
    if preview:
        commands.preview(config, out)
        return
    sys.exit(commands.build_tree(config, out))


@cli.command()
@_PAIRS
@setting("--alpha", "pairs.alpha", "Decay of the rewards per action; 1 leaves the shortest-path term out.", type=float)
@setting(
    "--level", "pairs.level", "Steps, or whole trajectories by outcome.", type=click.Choice(["step", "trajectory"])
)
@click.option("--out", type=click.Path(path_type=Path), help="Write there and leave the run as it is.")
@click.argument("run", type=click.Path(path_type=Path))
def pairs(run: Path, out: Path | None, **flags: Any) -> None:
    """Derive a finished run's pairs anew, with no model call.

    \b
      reasonrag pairs runs/hotpot --min-margin 0.05
    Without the shortest-path term, beside the run:
      reasonrag pairs runs/hotpot --alpha 1 --out runs/hotpot-alpha1
    """
    from reasonrag import commands

    commands.derive(run, out, {name.replace("__", "."): value for name, value in flags.items() if value is not None})


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
    from reasonrag import commands

    commands.write_world(out, world_seed)


@demo.command("policy")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for model and tokenizer.")
@click.option("--seed", type=int, default=0, show_default=True)
def demo_policy(out: Path, seed: int) -> None:
    """Train the tiny policy from nothing (a quarter of an hour on one core).

    \b
      reasonrag demo policy --out policy --seed 0
      reasonrag build-tree --preset demo --policy hf:policy --out runs/own
    """
    from reasonrag.demo.train import train_policy

    train_policy(out, seed=seed, log=click.echo)


@cli.command()
def doctor() -> None:
    """What is installed, which backends would work here, and why the others would not.

    \b
      reasonrag doctor
    """
    from reasonrag.doctor import report

    click.echo(report())


def main() -> None:
    """Entry point: one line for what the user can mend, no traceback."""
    # Until a run drains on Ctrl-C by itself nothing is paid for; a library's bare `except` while it is being imported
    # would swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except ReasonRAGError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        _fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); mend that and run the command again")


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    sys.exit(2)
