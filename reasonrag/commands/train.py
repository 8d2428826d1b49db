"""`dpo`, `sft` and `prm`: training on pairs and trees. `rl` runs its training with `run_training`, too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import Group, configuration, out, rare, settings, sources
from reasonrag.core.errors import Interrupted
from reasonrag.core.text import printable

if TYPE_CHECKING:
    from reasonrag.training.run import TrainingRun

OUT = out(
    "The folder of the policy; the same command resumes its training run (default: runs/DATA-STAGE, or the next free "
    "number of it).",
    required=False,
)
_COMMON = (
    *("data", "model", "method", "learning_rate", "num_train_epochs", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "limit", "seed", "merge"),
)
_RARE = ("chat_template", "lora", "max_length", "max_dropped", "save_steps", "report_to")


@click.group(cls=Group)
def dpo() -> None:
    """Preference learning on steps, with TRL.

    \b
      reasonrag dpo train
    """


@dpo.command("train")
@settings("DPOSettings", *_COMMON, "beta", "loss_type")
@rare(settings("DPOSettings", *_RARE, "reference", "weight", "reward_margin", "sft_weight"))
@configuration("DPOSettings")
@OUT
def dpo_train(out: Path | None, **given: Any) -> None:
    """Train a policy on preference pairs. Only the tokens of the steps are scored.

    \b
    On the newest finished run in runs/, the policy that acted there (else the paper's, which needs a GPU):
      reasonrag dpo train
    On one GPU, adapters:
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo --merge
    The published configuration, on eight GPUs:
      accelerate launch --config_file configs/fsdp.yaml -m reasonrag dpo train --preset reasonrag \\
          --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    Without a GPU, in the demo world:
      reasonrag dpo train --preset demo --data runs/demo/trees --out runs/demo/dpo

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    config = _settings("DPO", given)
    from reasonrag.dpo.train import train_dpo

    run_training(train_dpo, config, out)


@click.group(cls=Group)
def sft() -> None:
    """Supervised fine-tuning on good steps, with TRL.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
    """


@sft.command("train")
@settings("SFTSettings", "examples", *_COMMON)
@rare(settings("SFTSettings", "per_question", "min_reward", "test_share", *_RARE))
@configuration("SFTSettings")
@OUT
def sft_train(out: Path | None, **given: Any) -> None:
    """Train a policy on good steps. The chosen ones of pairs are the paper's baseline for DPO.

    \b
    A base model, on the best attempts in the trees of another policy:
      reasonrag sft train --examples trajectories --data runs/extractive --model google/gemma-3-270m \\
          --chat-template gemma --out policies/cold
    The paper's baseline:
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
      reasonrag sft train --preset demo --data runs/demo/trees --out runs/demo/sft

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    config = _settings("SFT", given)
    from reasonrag.dpo.train import train_sft

    run_training(train_sft, config, out)


@click.group(cls=Group)
def prm() -> None:
    """Process reward models: the value of a step, learned from the steps of trees."""


@prm.command("train")
@settings("PRMSettings", *_COMMON)
@rare(settings("PRMSettings", "alpha", "test_share", *_RARE))
@configuration("PRMSettings")
@OUT
def prm_train(out: Path | None, **given: Any) -> None:
    """Train a process reward model on the steps of a run's trees. It learns the SPRE of each, as surely as it is known.

    \b
    On one GPU, adapters:
      reasonrag prm train --data runs/hotpot --model Qwen/Qwen2.5-1.5B-Instruct --out policies/prm
    Without a GPU, in the demo world; then the best of four attempts at each question:
      reasonrag prm train --preset demo --data runs/demo/trees --out runs/demo/prm
      reasonrag eval --preset demo --policy demo --temperature 1 --best-of 4 --prm runs/demo/prm --out reports/best

    training.json has its metrics on held-out questions. If the training run is killed or stopped, the same command
    resumes it from the last checkpoint.
    """
    config = _settings("PRM", given)
    from reasonrag.prm.train import train_prm

    run_training(train_prm, config, out)


def _settings(kind: str, given: dict[str, Any]) -> Any:
    """Return the settings of a command, before TRL is imported, so that wrong ones are reported at once."""
    from reasonrag.core.settings import gather, validate
    from reasonrag.training import settings as models

    config = validate(getattr(models, f"{kind}Settings"), gather(getattr(models, f"{kind}_PRESETS"), **sources(given)))
    from reasonrag.commands.defaults import with_pairs_and_model

    return with_pairs_and_model(config, print_line)


def print_line(line: str) -> None:
    """Print a line of a training run on stderr; of several processes, only the first one prints."""
    if os.environ.get("RANK", "0") == "0":
        click.echo(printable(line), err=True)


def run_training(train: Callable[..., TrainingRun[Any]], config: Any, out: Path | None) -> None:
    """Train, print where the policy is, and exit."""
    from reasonrag.commands.console import error_console, log_plainly, this_command

    log_plainly()
    try:
        run = train(config, out, log=print_line)
    except Interrupted as stopped:
        error_console().print(f"{stopped}. Resume with:\n  {this_command()}")
        sys.exit(128 + (stopped.number or signal.SIGINT))
    if run.summary:  # only the first process of a launch has one
        print(f"{'model' if run.stage == 'prm' else 'policy'}: {run.out}")
