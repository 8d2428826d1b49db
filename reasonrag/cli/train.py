"""`dpo`, `sft` and `rl`: everything that trains a policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

from reasonrag import flags
from reasonrag.cli.root import cli
from reasonrag.core.config import Config
from reasonrag.online_rl.presets import RL_PRESETS
from reasonrag.training.settings import DPO_PRESETS, SFT_PRESETS, DPOSettings, SFTSettings


@cli.group()
def dpo() -> None:
    """Preference learning on steps, with TRL.

    \b
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    """


@dpo.command("train")
@flags.TRAINING
@flags.DPO
@flags.training_config(DPO_PRESETS)
def dpo_train(out: Path, **given: Any) -> None:
    """Train a policy on preference pairs; what is scored is exactly the step.

    \b
    On one GPU, adapters:
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo --merge
    The published configuration, on eight GPUs:
      accelerate launch --config_file configs/fsdp.yaml -m reasonrag dpo train --preset reasonrag \\
          --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    Without a GPU, in the demo world:
      reasonrag dpo train --preset demo --data runs/demo/trees --out runs/demo/dpo

    Killed or stopped, the same command goes on from the last checkpoint.
    """
    from reasonrag.commands import train

    sys.exit(train.dpo(flags.training(DPOSettings, DPO_PRESETS, given), out))


@cli.group()
def sft() -> None:
    """Supervised fine-tuning on chosen steps, with TRL.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
    """


@sft.command("train")
@flags.TRAINING
@flags.training_config(SFT_PRESETS)
def sft_train(out: Path, **given: Any) -> None:
    """Train a policy on the chosen steps of preference pairs: the paper's rival of DPO.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
      reasonrag sft train --preset demo --data runs/demo/trees --out runs/demo/sft
    """
    from reasonrag.commands import train

    sys.exit(train.sft(flags.training(SFTSettings, SFT_PRESETS, given), out))


@cli.group()
def rl() -> None:
    """Online training on rollouts, with TRL's GRPO.

    \b
      reasonrag rl train --preset hiprag --data hotpotqa --policy Qwen/Qwen2.5-3B-Instruct --out policies/hiprag
    """


@rl.command("train")
@flags.RL
@flags.training_config(RL_PRESETS)
def rl_train(out: Path, **given: Any) -> None:
    """Train a policy online: the engine that builds trees makes the rollouts, a reward scores each of them.

    \b
    HiPRAG on a corpus of yours, with a judge on a server:
      reasonrag rl train --preset hiprag --data questions.jsonl --corpus corpus.jsonl \\
          --policy Qwen/Qwen2.5-3B-Instruct --judge http://127.0.0.1:8001/v1 --judge-model org/judge \\
          --out policies/hiprag
    Rollouts by a vLLM server, which is sent the weights before each batch:
      reasonrag rl train --preset search-r1 --data hotpotqa --policy Qwen/Qwen2.5-3B-Instruct \\
          --rollout-url http://127.0.0.1:8000/v1 --out policies/search-r1
    Without a GPU, in the demo world:
      reasonrag rl train --preset demo-outcome --out runs/demo/outcome

    Killed or stopped, the same command goes on from the last checkpoint.
    """
    from reasonrag.commands import train

    sys.exit(train.rl(flags.online(RL_PRESETS, given), out))


@rl.command("plan")
@flags.setting(Config, "--data", "questions.dataset")
@flags.setting(Config, "--split", "questions.split")
@flags.setting(Config, "--limit", "questions.limit", type=int)
@flags.setting(Config, "--judge", "judge.spec", "The model that plans, as --policy of build-tree; also demo-judge.")
@flags.setting(Config, "--judge-model", "judge.model")
@flags.setting(Config, "--concurrency", "run.concurrency", type=int)
@flags.setting(Config, "--input-price", "judge.input_price", type=float)
@flags.setting(Config, "--output-price", "judge.output_price", type=float)
@click.option("--k", type=click.IntRange(1), default=4, show_default=True, help="Candidates a question.")
@click.option(
    "--correct", type=click.Choice(["em", "cem"]), default="em", show_default=True, help="Which candidates are kept."
)
@click.option("--show-answer", is_flag=True, help="To the planner, as App. D.2 prints it; then all are correct.")
@flags.CONFIG
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A Parquet file; resumed if not finished.")
def rl_plan(
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    out: Path,
    k: int,
    correct: Literal["em", "cem"],
    show_answer: bool,
    **given: Any,
) -> None:
    """Make Search-P1's reference plans: candidates, the correct ones kept, a vote for the steps that are needed.

    \b
      reasonrag rl plan --data hotpotqa --split train --judge http://127.0.0.1:8001/v1 \\
          --judge-model org/judge --out plans.parquet
      reasonrag rl plan --preset demo --judge demo-judge --out plans.parquet

    Killed or stopped, the same command goes on where it was.
    """
    from reasonrag.commands.rl_plan import plan

    config = flags.resolve(preset, file, assignments, {**given, "value__kind": "judge"})
    sys.exit(plan(config, out, k=k, correct=correct, show_answer=show_answer))
