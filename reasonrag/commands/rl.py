"""`rl`: online training on rollouts, and the reference plans of Search-P1."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import Group, configuration, out, rare, settings, sources
from reasonrag.commands.train import OUT, print_line, run_training
from reasonrag.core.errors import Interrupted, RunError

if TYPE_CHECKING:
    from reasonrag.core.config import Config
    from reasonrag.online_rl.reference_plans import Made
    from reasonrag.online_rl.settings import PlanSettings, RLSettings
    from reasonrag.pipeline.work import Progress

_SEARCH = ("retrieval.corpus", "retrieval.index", "retrieval.url")
_BATCH = ("rollout.questions_per_step", "rollout.group_size", "per_device_train_batch_size")


@click.group(cls=Group)
def rl() -> None:
    """Online training on rollouts, with TRL's GRPO.

    \b
      reasonrag rl train
      reasonrag rl train --preset hiprag --dataset hotpotqa --model Qwen/Qwen2.5-3B-Instruct --out policies/hiprag
    """


@rl.command("train")
@settings("RLSettings", "data", "limit", *_SEARCH, "model", "format.name", "reward.name", "judge.spec", "judge.model")
@settings("RLSettings", "method", "learning_rate", "max_steps", *_BATCH, "rollout.url", "seed")
@rare(
    settings("RLSettings", "split", "exclude", "world_seed", "retrieval.kind", "retrieval.top_k", "chat_template"),
    settings("RLSettings", "format.prompts", "format.max_steps", "format.max_searches", "plans"),
    settings("RLSettings", "algorithm", "loss_type", "beta", "credit", "sampling.dynamic", "guards"),
    settings("RLSettings", "reward.prm.model", "rollout.ahead", "save_steps", "report_to", "merge"),
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
      reasonrag rl train --preset demo-outcome --out runs/demo/outcome

    The same command resumes a killed or stopped run from its last checkpoint.
    """
    config = online_settings(given)
    from reasonrag.online_rl.train import train_online

    run_training(train_online, config, out)


def online_settings(given: dict[str, Any]) -> RLSettings:
    """Return the settings of `rl train` from its options; `--rollout-url` implies the engine vllm-server.

    Defaults are chosen and printed: the newest policy of `dpo train` with its questions, or a paper's model.
    """
    from reasonrag.core.settings import gather
    from reasonrag.online_rl.settings import load_rl_settings, rl_presets

    asked = sources(given)
    named = gather({}, file=asked["file"], overrides=asked["overrides"])
    of_preset = gather(rl_presets(), preset=asked.get("preset"))
    for name, flag in (("model", "--model"), ("data", "--dataset")):
        if name in of_preset and name not in named:
            print_line(f"{name}: {of_preset[name]}, the preset's; {flag} chooses another")
    if "model" not in named or "data" not in {**of_preset, **named}:
        from reasonrag.commands.defaults import online_defaults, require_gpu

        asked["overrides"] |= online_defaults(gather(rl_presets(), **asked), print_line)
        if "model" not in named:
            require_gpu(load_rl_settings(**asked))
    return load_rl_settings(**asked)


@rl.command("plan")
@settings("Config", "questions.dataset", "questions.split", "questions.limit", *_SEARCH)
@settings("Config", "policy.spec", "policy.model", "format.name", "format.max_steps", "judge.spec", "judge.model")
@settings("RLSettings", "planning", show_keys=False)
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

    `rl train` makes plans with the policy itself if it is given none. If the command is killed or stopped, the same
    command resumes it.
    """
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import validate
    from reasonrag.online_rl.settings import PlanSettings

    names = [name for name in PlanSettings.model_fields if given.get(name) is not None]
    planning = validate(PlanSettings, {name: given[name] for name in names})
    asked = sources({name: value for name, value in given.items() if name not in PlanSettings.model_fields})
    asked["overrides"]["value.kind"] = "judge"
    sys.exit(plan(load_config(**asked), out, planning))


def plan(config: Config, out: Path, planning: PlanSettings) -> int:
    """Make reference plans for Search-P1, and print where they are; return the exit code.

    A journal next to the file keeps every reply under the content of its request before it is used. So the same command
    resumes after a kill, and other candidates or questions cost only their new calls.
    """
    from reasonrag.commands.console import Stop, error_console, log_plainly, table_console
    from reasonrag.core import event_loop
    from reasonrag.core.table import Table
    from reasonrag.formats import PromptSet
    from reasonrag.llm.journaled import JournaledLLM
    from reasonrag.online_rl.reference_plans import NO_CORRECT, NO_SEARCH, make_plans, save_plans
    from reasonrag.pipeline.models import as_served
    from reasonrag.pipeline.parts import Parts, check, judge_service, open_engine, open_parts
    from reasonrag.pipeline.work import Progress
    from reasonrag.retrieval.batched import BatchedRetriever
    from reasonrag.storage.files import lock
    from reasonrag.storage.journal import Journal

    log_plainly()
    stop = Stop(error_console())
    config = as_served(config)
    parts = open_parts(config)
    assert parts.judge is not None  # value.kind is judge
    judge_model = parts.judge
    journal_path = out.with_name(f"{out.name}.journal.sqlite")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(21, "is a folder")
    except OSError as error:
        raise RunError(f"{out} cannot hold plans ({error.strerror}); choose another file for --out") from error
    progress = Progress(len(parts.questions), "questions", label="reference plans")

    async def make(journal: Journal, parts: Parts) -> Made:
        policy = JournaledLLM(parts.policy, journal, kind="policy")
        judge = JournaledLLM(judge_model, journal, kind="judge")
        progress.open(policy, config.prices["policy"])
        progress.open(judge, config.judge.llm)
        retriever = BatchedRetriever.of_run(parts.retriever, journal)
        engine = open_engine(config, policy, retriever, parts.format)
        async with contextlib.aclosing(parts):
            await check(parts, wait_s=config.run.wait_s)
            async with stop.show(progress, journal.drain):
                return await make_plans(
                    parts.questions,
                    engine,
                    judge_service(judge, config.judge, PromptSet.find(config.format.prompts)),
                    settings=planning,
                    seed=config.seed,
                    counts=progress,
                    concurrency=config.policy.concurrency or 64,
                    max_failed=config.run.max_failed,
                )

    with lock(out.with_name(f".{out.name}.lock")), contextlib.closing(Journal(journal_path)) as journal:
        try:
            made = event_loop.run(make(journal, parts))
            save_plans(out, made.rows)
        except Interrupted:
            return stop.print_resume_hint()
    total = len(parts.questions)
    table_console().print(Table("rl plan", ("", ""), list(_summary_rows(made, total, progress))).terminal())
    print(f"plans: {out}")
    causes = {cause: count for cause, count in made.without.items() if cause not in (NO_CORRECT, NO_SEARCH)}
    return stop.print_missing(causes, made.untried, most=config.run.max_failed * total)


def _summary_rows(made: Made, questions: int, progress: Progress) -> Iterator[tuple[str, str]]:
    yield "plans", f"{len(made.rows)} of {questions} questions"
    for cause, count in sorted(made.without.items()):
        yield f"  without: {cause}", str(count)
    yield "calls of this process", str(progress.usage.calls)
    yield "  tokens", str(progress.usage.tokens)
    if progress.usage.cost is not None:
        yield "  cost", f"{progress.usage.cost:.2f}"
    yield "seconds", f"{progress.seconds:.1f}"
