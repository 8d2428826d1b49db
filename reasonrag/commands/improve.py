"""`improve`: rounds of trees, training and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import DRY_RUN, command, configuration, out, rare, settings, sources
from reasonrag.core.text import printable


@command("improve")
@settings("ImproveSettings", "rounds", "questions.dataset", "questions.split", "questions.limit", "retrieval.corpus")
@settings("ImproveSettings", "retrieval.index", "retrieval.url", "policy.spec", "policy.model", "policy.temperature")
@settings("ImproveSettings", "search.iterations", "value.kind", "value.rollouts", "outcome.name", "seed")
@click.option("--train", type=click.Choice(["dpo", "sft"]), default="dpo", help="Training on the pairs of a round.")
@settings("ImproveSettings", "train.model", "train.method", "train.learning_rate", "train.num_train_epochs")
@rare(
    settings("ImproveSettings", "questions.exclude", "questions.world_seed", "retrieval.kind", "retrieval.top_k"),
    settings("ImproveSettings", "policy.card", "policy.chat_template", "policy.max_tokens", "format.prompts"),
    settings("ImproveSettings", "format.max_steps", "search.lag", "search.max_calls", "value.alpha"),
    settings("ImproveSettings", "outcome.votes", "judge", "run", "policy.concurrency"),
    settings("ImproveSettings", "train.per_device_train_batch_size", "train.gradient_accumulation_steps"),
    settings("ImproveSettings", "train.save_steps", "train.min_examples", "train.min_questions"),
)
@configuration("ImproveSettings")
@out("The folder of the run; the same command resumes it (default: runs/improve).", required=False)
@DRY_RUN
def improve(out: Path | None, train: str, dry_run: bool, **given: Any) -> None:
    """Improve a policy in rounds: trees on new questions, pairs, training, evaluation, until dev stops rising.

    --limit is that of a round; no round repeats a question, or trains on one of dev.

    \b
    Without a GPU, in the demo world:
      reasonrag improve --preset demo --rounds 2 --limit 60 --out runs/improve
    A model on a vLLM server, which is started for each round's policy:
      reasonrag improve --dataset hotpotqa --limit 500 --policy http://127.0.0.1:8000/v1 \\
          --model Qwen/Qwen2.5-7B-Instruct --serve "vllm serve {model} --port 8000" --out runs/improve

    If the run is killed or stopped, the same command resumes it.
    """
    from reasonrag.commands.console import Stop, error_console, log_plainly, open_tracker
    from reasonrag.commands.train import print_line
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import dump, gather, validate
    from reasonrag.rounds import Improvement, RoundsSettings, improve_presets
    from reasonrag.storage.files import RUNS, require_json
    from reasonrag.storage.folder import finished, mark_finished
    from reasonrag.training.settings import DPOSettings, SFTSettings

    log_plainly()
    out = out or RUNS / "improve"
    tree = gather(improve_presets(train), **sources(given))
    of_training, of_rounds = (tree.pop(name, {}) for name in ("train", "rounds"))
    config = load_config(overrides=tree)
    tree = {"seed": config.seed} | of_training
    training = validate(DPOSettings, tree) if train == "dpo" else validate(SFTSettings, tree)
    command = ("improve", config, training, validate(RoundsSettings, of_rounds))
    if not dry_run and finished(out, *command):
        summary = require_json(out / "improve.json")
    else:
        improvement = Improvement(*command[1:], out, log=print_line)
        if dry_run:
            click.echo(printable(dump(improvement.settings) + "\n" + improvement.bound()))
            return
        stop, track = Stop(error_console()), open_tracker(config.run.report_to)
        with stop.resumable():
            summary = improvement.run(lambda work: stop.show(work.progress, work.drain), lambda: stop.number)
        track(out, {f"round {row['round']}": row for row in summary["rounds"]})
        mark_finished(out, *command)
    page = (out / "improve.md").read_text(encoding="utf-8").splitlines()
    print("\n".join(line for line in page if not line.startswith(("#", "!"))).strip())
    print(f"best policy: {out / summary['policy'] if summary['best'] else summary['policy']}")
