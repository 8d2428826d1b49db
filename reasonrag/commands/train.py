"""`dpo`, `sft`, `prm`, `rl` and `env`: training on pairs, trees and rollouts, and rollouts for other trainers.

A training command that is given no data and no model takes the newest run in runs/ and the policy that
acted there. It prints every choice, and an error lists the alternatives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import Command, Group, configuration, given_settings, out, rare, settings, sources
from reasonrag.core.errors import ConfigError, DataError, Interrupted, RunError
from reasonrag.core.text import printable

if TYPE_CHECKING:
    from reasonrag.core.config import Config
    from reasonrag.core.settings import Tree
    from reasonrag.online_rl.settings import PlanSettings, RLSettings
    from reasonrag.training.settings import TrainSettings

OUT = out(
    "The folder of the policy; the same command resumes its training run (default: runs/DATA-STAGE, or the next free "
    "number of it).",
    required=False,
)
_COMMON = (
    *("data", "model", "method", "learning_rate", "num_train_epochs", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "limit", "seed", "merge"),
)
_RARE = ("chat_template", "lora", "max_length", "max_dropped", "save_steps", "min_examples", "min_questions")
_SEARCH = ("retrieval.corpus", "retrieval.index", "retrieval.url")
_BATCH = ("rollout.questions_per_step", "rollout.group_size", "per_device_train_batch_size")
# What users of TRL and transformers type, by our option, or by the setting that `--set` takes.
_TRL_OPTIONS = {
    "output_dir": ("--out",),
    "model_name_or_path": ("--model",),
    "dataset_name": ("--data", "--dataset"),
    "per_device_train_batch_size": ("--batch-size",),
    "gradient_accumulation_steps": ("--accumulation",),
    "num_train_epochs": ("--epochs",),
    "num_generations": ("--group-size",),
}
_TRL_TRAINER = (
    *("bf16", "fp16", "gradient_checkpointing", "deepspeed", "fsdp", "fsdp_config", "torch_compile", "optim"),
    *("logging_steps", "eval_steps", "weight_decay", "max_grad_norm", "report_to", "run_name"),
)
_TRL_SETTINGS = {
    **{"max_steps": "max_steps", "lr_scheduler_type": "lr_scheduler_type", "warmup_ratio": "warmup_ratio"},
    **{"dtype": "dtype", "model_revision": "revision", "use_peft": "method"},
    **{name: f"trainer.{name}" for name in _TRL_TRAINER},
}
_TRL_ELSEWHERE = {
    "push_to_hub": "publish the policy afterwards, private and scanned for secrets: `reasonrag publish OUT`",
    "resume_from_checkpoint": "leave it out: the same command resumes from the last whole checkpoint of --out",
}
_TRL_NAMES = {**_TRL_OPTIONS, **_TRL_SETTINGS, **_TRL_ELSEWHERE}


class TrainCommand(Command):
    """A training command: it takes the names of TRL's and transformers' arguments too, with hyphens or underscores."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, those of TRL as the options or settings that they stand for."""
        return super().parse_args(ctx, list(self._as_ours(ctx, args)))

    def _as_ours(self, ctx: click.Context, args: Sequence[str]) -> Iterator[str]:
        ours = {option for each in self.get_params(ctx) for option in (*each.opts, *each.secondary_opts)}
        words = list(args)
        while words:
            word = words.pop(0)
            option, equals, value = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            hyphened = "--" + name.replace("_", "-")
            if not option.startswith("--") or option in ours:
                yield word
                continue
            if same := ours.intersection((hyphened, *_TRL_OPTIONS.get(name, ()))):
                yield same.pop() + equals + value
                continue
            if name in _TRL_SETTINGS and not equals:  # a switch alone is true
                value = "true" if not words or words[0].startswith("--") else words.pop(0)
            if name == "use_peft":
                value = "lora" if value.lower() == "true" else "full"
            if name in _TRL_ELSEWHERE:
                raise click.UsageError(f"{option} is not supported: {_TRL_ELSEWHERE[name]}")
            if name not in _TRL_SETTINGS:
                raise click.NoSuchOption(option, possibilities=ours.union(map("--{}".format, _TRL_NAMES)), ctx=ctx)
            yield from ("--set", f"{_TRL_SETTINGS[name]}={value}")


@click.group(cls=Group)
def dpo() -> None:
    """Preference learning on steps, with TRL.

    \b
      reasonrag dpo train
    """


@dpo.command("train", cls=TrainCommand)
@settings("DPOSettings", *_COMMON, "beta", "loss_type")
@rare(settings("DPOSettings", *_RARE, "reference", "smooth_by_confidence"))
@configuration("DPOSettings")
@OUT
def dpo_train(out: Path | None, **given: Any) -> None:
    """Train a policy on preference pairs. Only the tokens of the steps are scored.

    \b
    The newest finished run in runs/, and the policy that acted there (else the paper's, which needs a GPU):
      reasonrag dpo train
    On one GPU, adapters:
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo --merge
    The published configuration, on eight GPUs:
      accelerate launch --config_file configs/fsdp.yaml -m reasonrag dpo train --preset reasonrag \\
          --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    Without a GPU, in the demo world:
      reasonrag dpo train --preset demo --data runs/demo --out runs/demo-dpo

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    _train("DPO", "reasonrag.dpo.train:train_dpo", given, out)


@click.group(cls=Group)
def sft() -> None:
    """Supervised fine-tuning on good steps, with TRL.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
    """


@sft.command("train", cls=TrainCommand)
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
      reasonrag sft train --preset demo --data runs/demo --out runs/demo-sft

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    _train("SFT", "reasonrag.dpo.train:train_sft", given, out)


@click.group(cls=Group)
def prm() -> None:
    """Process reward models: the value of a step, learned from the steps of trees."""


@prm.command("train", cls=TrainCommand)
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
      reasonrag prm train --preset demo --data runs/demo --out runs/demo-prm
      reasonrag eval --preset demo --policy demo --temperature 1 --best-of 4 --prm runs/demo-prm --out reports/best

    training.json has its metrics on held-out questions. If the training run is killed or stopped, the
    same command resumes it from the last checkpoint.
    """
    _train("PRM", "reasonrag.prm.train:train_prm", given, out)


@click.group(cls=Group)
def rl() -> None:
    """Online training on rollouts, with TRL's GRPO.

    \b
      reasonrag rl train
      reasonrag rl train --preset hiprag --dataset hotpotqa --model Qwen/Qwen2.5-3B-Instruct --out policies/hiprag
    """


@rl.command("train", cls=TrainCommand)
@settings("RLSettings", "data", "limit", *_SEARCH, "model", "format.name", "reward.name", "outcome.name")
@settings(
    "RLSettings", "judge.spec", "judge.model", "method", "learning_rate", "max_steps", *_BATCH, "rollout.url", "seed"
)
@rare(
    settings("RLSettings", "split", "exclude", "world_seed", "retrieval.kind", "retrieval.top_k", "chat_template"),
    settings("RLSettings", "format.prompts", "format.open_tags", "format.max_steps", "format.max_searches", "plans"),
    settings("RLSettings", "algorithm", "loss_type", "beta", "credit", "sampling.dynamic", "guards"),
    settings("RLSettings", "reward.prm.model", "outcome.votes", "lora", "save_steps", "merge", "min_questions"),
    settings("RLSettings", "rollout.ahead"),
)
@configuration("RLSettings")
@OUT
def rl_train(out: Path | None, **given: Any) -> None:
    """Train a policy online. The engine of build-tree makes trajectories, and a reward scores each of them.

    \b
    The newest policy of `dpo train` in runs/, on the questions of its pairs:
      reasonrag rl train
    HiPRAG on your own corpus, with a judge on a server:
      reasonrag rl train --preset hiprag --dataset questions.jsonl --corpus corpus.jsonl \\
          --model Qwen/Qwen2.5-3B-Instruct --judge http://127.0.0.1:8001/v1 --judge-model org/judge \\
          --out policies/hiprag
    Rollouts by a vLLM server, which gets the weights before each batch:
      reasonrag rl train --preset search-r1 --dataset hotpotqa --model Qwen/Qwen2.5-3B-Instruct \\
          --rollout-url http://127.0.0.1:8000/v1 --out policies/search-r1
    Without a GPU, in the demo world (also demo-hiprag, demo-hiprag-ppo, demo-search-p1, demo-when-to-search):
      reasonrag rl train --preset demo-outcome --out runs/demo-outcome

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    run_training("reasonrag.online_rl.train:train_online", online_settings(given), out)


@rl.command("plan")
@settings("Config", "questions.dataset", "questions.split", "questions.limit", *_SEARCH)
@settings("Config", "policy.spec", "policy.model", "format.name", "format.max_steps", "judge.spec", "judge.model")
@settings("PlanSettings", "candidates", "show_answer", show_keys=False)
@rare(
    settings("Config", "questions.exclude", "questions.world_seed", "retrieval.kind", "retrieval.top_k"),
    settings("Config", "policy.card", "policy.chat_template", "policy.temperature", "policy.max_tokens"),
    settings("Config", "format.prompts", "format.max_searches", "run.max_unreadable", "seed", "policy.concurrency"),
    settings("Config", "judge.input_price", "judge.output_price"),
)
@configuration("Config")
@out("A Parquet file; the same command resumes it.")
def rl_plan(out: Path, **given: Any) -> None:
    """Make reference plans for Search-P1. Attempt each question, keep correct attempts, vote for the needed steps.

    \b
      reasonrag rl plan --dataset hotpotqa --split train --index indexes/wiki18 --format search_p1 --max-turns 5 \\
          --policy http://127.0.0.1:8001/v1 --policy-model org/strong \\
          --judge http://127.0.0.1:8002/v1 --judge-model org/planner --out plans.parquet
      reasonrag rl plan --preset demo --policy demo:search_p1 --judge demo-judge --out plans.parquet

    If the command is killed or stopped, the same command resumes it.
    """
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import validate
    from reasonrag.online_rl.settings import PlanSettings

    planning = validate(PlanSettings, given_settings({name: given.pop(name) for name in PlanSettings.model_fields}))
    choices = sources(given)
    choices["overrides"]["value.kind"] = "judge"
    sys.exit(plan(load_config(**choices), out, planning))


def plan(config: Config, out: Path, planning: PlanSettings) -> int:
    """Make reference plans for Search-P1, and print where they are; return the exit code."""
    from reasonrag.commands.console import Stop, error_console, log_plainly, table_console
    from reasonrag.core import event_loop
    from reasonrag.core.table import Table
    from reasonrag.online_rl.reference_plans import load_plans, make_plans, save_plans
    from reasonrag.pipeline.parts import as_served, check, open_engine, open_parts
    from reasonrag.pipeline.work import Progress
    from reasonrag.storage.files import lock
    from reasonrag.storage.folder import Folder
    from reasonrag.storage.journal import Journal

    log_plainly()
    stop = Stop(error_console())
    config = as_served(config)
    parts = open_parts(config)
    if out.is_dir():  # before anything is paid for
        raise RunError(f"{out} is a folder; choose a file for --out")
    try:
        _ = out.exists() and load_plans(out)
    except DataError:
        raise ConfigError(f"{out} exists and is no file of plans; choose another name for --out") from None
    out.parent.mkdir(parents=True, exist_ok=True)
    journal_path = out.with_name(f"{out.name}.journal.sqlite")
    has_begun, record = journal_path.exists(), Folder(out.parent, "journal", record=f"{out.name}.journal.json")
    progress = Progress(len(parts.questions), "questions", label="reference plans")

    # Every reply is in the journal, under the content of its request,
    # before it is used. So the same command resumes after a kill, and
    # other candidates or questions cost their new calls alone.
    async def make(journal: Journal) -> list[dict[str, Any]]:
        policy, judge, retriever = parts.journaled(progress, journal, config)
        assert judge is not None  # value.kind is judge
        engine = open_engine(config, policy, retriever, parts.format)
        async with contextlib.aclosing(parts):
            before = record.facts().get("served")
            record.keep_served(await check(parts, begun=has_begun, before=before, wait_s=config.run.wait_s))
            async with stop.show(progress, journal.drain):
                return await make_plans(
                    parts.questions,
                    engine,
                    judge,
                    journal,
                    progress,
                    settings=planning,
                    seed=config.seed,
                    max_failed=config.run.max_failed,
                    stall_s=config.stall_s,
                )

    locked = lock(out.with_name(f".{out.name}.lock"))
    with locked, contextlib.closing(Journal(journal_path)) as journal, stop.resumable():
        save_plans(out, event_loop.run(make(journal)))
    rows = [("plans", f"{progress.written['plans']} of {progress.total} questions")]
    without = sorted((progress.written + progress.causes).items())
    rows += [(f"  without: {cause}", str(count)) for cause, count in without if cause != "plans"]
    rows.append(("calls of this process", str(progress.calls)))
    table_console().print(Table("rl plan", ("", ""), rows).terminal())
    print(f"plans: {out}")
    return stop.print_missing(progress.causes, progress.done, progress.total, max_failed=config.run.max_failed)


@click.group(cls=Group)
def env() -> None:
    """The rollout engine as an environment for other trainers.

    \b
      reasonrag env serve --preset demo-outcome
    """


@env.command()
@settings("RLSettings", "data", "split", "limit", *_SEARCH, "model", "format.name", "reward.name")
@settings("RLSettings", "judge.spec", "judge.model")
@rare(
    settings("RLSettings", "exclude", "world_seed", "retrieval.top_k", "format.prompts", "format.max_steps"),
    settings("RLSettings", "format.max_searches", "reward.prm.model", "plans"),
)
@settings("ListenSettings", "port", show_keys=False)
@configuration("RLSettings")
def serve(**given: Any) -> None:
    """Serve questions, searches and rewards to OpenEnv's clients. They get prompts and keep the policy.

    It serves the task that `rl train` with the same options trains on. If --model is a policy trained
    here, its prompts are the ones of its training.

    \b
    Search-R1's reward on your own questions:
      reasonrag env serve --preset search-r1 --dataset questions.jsonl --corpus corpus.jsonl --port 8010
    In the demo world:
      reasonrag env serve --preset demo-outcome --port 8010

    SIGTERM and Ctrl-C end the server.
    """
    from reasonrag.agents.environment import serve_environment
    from reasonrag.commands.console import log_plainly
    from reasonrag.core.serving import ListenSettings
    from reasonrag.core.settings import validate
    from reasonrag.online_rl.settings import load_rl_settings

    log_plainly()
    listening = validate(ListenSettings, given_settings({"port": given.pop("port")}))
    sys.exit(serve_environment(load_rl_settings(**sources(given)), listening))


# --- What they share ---


def _train(kind: str, trainer: str, given: dict[str, Any], out: Path | None) -> None:
    """Train on pairs or trees; the settings are checked before TRL is imported, so wrong ones are reported at once."""
    from reasonrag.core.settings import gather, validate
    from reasonrag.training import settings as models

    tree = gather(getattr(models, f"{kind}_PRESETS"), **sources(given))
    config = with_pairs_and_model(validate(getattr(models, f"{kind}Settings"), tree), print_line)
    run_training(trainer, config, out)


def print_line(line: str) -> None:
    """Print a line of a training run on stderr; of several processes, only the first one prints."""
    from reasonrag.commands.console import is_quiet

    # `accelerate launch` and torchrun number the processes; each of them runs the whole command.
    if os.environ.get("RANK", "0") == "0" and not (is_quiet() and line.startswith("step ")):
        click.echo(printable(line), err=True)


def run_training(trainer: str, config: Any, out: Path | None) -> None:
    """Train by a function, `MODULE:NAME`, unless that has been done; print where the policy is."""
    from reasonrag.commands.console import error_console, log_plainly, this_command
    from reasonrag.storage.folder import finished, mark_finished

    log_plainly()
    noun = "model" if "train_prm" in trainer else "policy"
    # Several processes (`accelerate launch`) have to agree on what there is to do.
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        print_line(
            f"one of {processes} processes, which wait for each other; if neither accelerate nor torchrun started it, "
            "unset RANK and WORLD_SIZE"
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # torch waits where Python's own handlers do not run
            signal.signal(number, signal.SIG_DFL)
    elif folder := finished(out, trainer, config):
        print_line("this training run is already finished")
        print(f"{noun}: {folder}")
        return
    try:
        run = resolve_name(trainer)(config, out, log=print_line)
    except Interrupted as stopped:
        error_console().print(f"{stopped}. Resume with:\n  {this_command()}")
        sys.exit(128 + (stopped.number or signal.SIGINT))
    if run.summary:  # only the first process of a launch has one
        print(f"{noun}: {run.out}")
        mark_finished(run.out, trainer, config)


# --- Choices of commands that are given no data or no model ---


def with_pairs_and_model(settings: Any, log: Callable[[str], None]) -> Any:
    """Return the settings of `dpo train`, `sft train` or `prm train` with the data and the model that are not named.

    Raises:
        ConfigError: a finished run is missing, or this machine cannot train the model.
    """
    from reasonrag.core.models import PAPER_POLICY, ModelAddress
    from reasonrag.llm.model_folder import model_identity
    from reasonrag.storage.files import read_json
    from reasonrag.storage.folder import read_run
    from reasonrag.training.model import acting_policy

    data, model = settings.data, settings.model
    if data is None:
        if (run := _newest("run.json")) is None:
            raise ConfigError(
                "no pairs to train on: --data is not given, and runs/ here has no finished run of build-tree. Make one "
                "with `reasonrag build-tree --dataset ...`, or name a run, a file or a data set on the Hub with --data"
            )
        pairs = (read_json(run / "run.json") or {}).get("pairs", {}).get("total", 0)
        log(f"data: {run}, the newest finished run in runs/ ({pairs:,} pairs)")
        data = str(run)
    if model is None:
        is_run = (Path(data) / "run.json").is_file()
        # The policy that wrote the pairs is on-policy for
        # them; a server's model is trained from its Hub id.
        config, summary = read_run(Path(data)) if is_run else (None, {})
        acting, may_lack_gpu = acting_policy(config.policy) if config else (None, False)
        known = summary.get("content", {}).get("policy", "")
        if acting and not acting.startswith("demo") and Path(acting).is_dir() and model_identity(acting) not in known:
            raise ConfigError(f"{known}, which wrote these pairs, is not in {acting} here; name it with --model")
        model = acting or PAPER_POLICY
        if not may_lack_gpu:
            _require_gpu(settings.model_copy(update={"model": model}))
        why = "which wrote these pairs" if acting else "the paper's; --model chooses another"
        hint = ". --preset demo has the settings for it" if ModelAddress.of_model(model).scheme == "demo" else ""
        log(f"model: {model}, {why}{hint}")
    return settings.model_copy(update={"data": data, "model": model})


def online_settings(given: dict[str, Any]) -> RLSettings:
    """Return the settings of `rl train` from its options.

    Defaults are chosen and printed: the newest policy of
    `dpo train` with its questions, or the paper's model.
    """
    from reasonrag.core.settings import gather
    from reasonrag.online_rl.settings import load_rl_settings, rl_presets

    choices = sources(given)
    tree = gather(rl_presets(), **choices)
    # A preset's model and data are defaults of ours, so they
    # are printed too, and a GPU is asked for before a download.
    named = gather({}, file=choices["file"], overrides=choices["overrides"])
    for name, flag in (("model", "--model"), ("data", "--dataset")):
        if name in tree and name not in named:
            print_line(f"{name}: {tree[name]}, the preset's; {flag} chooses another")
    if "model" not in named or "data" not in tree:
        choices["overrides"] |= online_defaults(tree, print_line)
    settings = load_rl_settings(**choices)
    if "model" not in named:
        _require_gpu(settings)
    return settings


def online_defaults(tree: Tree, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the settings of `rl train` that `tree` leaves open: the policy of the last `dpo train`, its questions.

    Args:
        tree: the settings of preset, file and flags.
        log: receives a line for each choice.

    Raises:
        ConfigError: nothing is named, and runs/ has no policy of `dpo train`.
    """
    from reasonrag.core.models import PAPER_POLICY

    model, data = tree.get("model"), tree.get("data")
    chosen: dict[str, Any] = {}
    if model is None and data is None:
        if (policy := _newest("training.json", stage="dpo")) is None:
            raise ConfigError(
                "nothing to train: neither --model nor --dataset is given, and runs/ here has no finished `dpo train` "
                "to go on from. Choose --preset demo-outcome (no GPU, no network), or --preset search-r1, hiprag, "
                "search-p1 or when-to-search with --dataset (hotpotqa, ..., or a file)"
            )
        log(f"model: {policy}, the newest policy of dpo train in runs/")
        model = chosen["model"] = str(policy)
    if model is None:
        log(f"model: {PAPER_POLICY}, the paper's; --model chooses another")
        chosen["model"] = PAPER_POLICY
    elif data is None:
        chosen |= _questions_of(Path(str(model)), tree, log)
    return chosen


def _questions_of(policy: Path, tree: Tree, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the questions of the run that made a policy's pairs, and its search unless `tree` has one."""
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import read_yaml

    file = policy / "config.yaml"
    trained = read_yaml(file) if file.is_file() else {}
    run = Path(str(trained.get("data")))
    if not (run / "run.json").is_file():
        return {}
    log(f"questions and search: from {run}, which made the pairs of that policy")
    config = load_config(file=run / "config.yaml")
    sample = config.questions.model_dump(include={"split", "limit", "world_seed"}) | {"seed": config.seed}
    if "min_questions" in trained:  # few questions that were enough there are enough here
        sample["min_questions"] = trained["min_questions"]
    chosen: dict[str, Any] = {"data": config.questions.dataset}
    # The same sample, unless a flag draws another one.
    chosen |= {name: value for name, value in sample.items() if name not in tree}
    # One place to search, not two: `--index` of this command replaces the corpus of that run.
    retrieval = tree.get("retrieval") or {}
    if not any(retrieval.get(name) for name in ("kind", "corpus", "index", "url")):
        searched = config.retrieval.model_dump(exclude_unset=True, exclude=set(retrieval))
        chosen |= {f"retrieval.{name}": value for name, value in searched.items()}
    return chosen


def _require_gpu(settings: TrainSettings) -> None:
    """Raise if a default model of the Hub would be trained without a GPU, before anything is downloaded."""
    from reasonrag.training.model import HUB_MODEL, uses_gpu

    model = str(settings.model)
    if HUB_MODEL.fullmatch(model) and not Path(model).exists() and not uses_gpu(settings):
        raise ConfigError(
            f"no --model is given, and there is no GPU for {model}; choose one of: a folder or a Hub id of a model "
            "that this machine can train, or demo[:FORMAT] (a tiny policy for the demo world)"
        )


def _newest(name: str, **expected: str) -> Path | None:
    """Return the folder of the newest JSON file of that name in runs/ that has the expected values."""
    from reasonrag.storage.files import RUNS, read_json

    for file in sorted(RUNS.rglob(name), key=lambda file: file.stat().st_mtime, reverse=True):
        summary = read_json(file)
        if summary is not None and summary.items() >= expected.items():
            return file.parent
    return None
