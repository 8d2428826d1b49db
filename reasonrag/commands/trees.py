"""`build-tree` and `pairs`: trees, and the preference pairs that are derived from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import (
    DRY_RUN,
    PATH,
    SHARD,
    command,
    configuration,
    given_settings,
    out,
    rare,
    settings,
    sources,
)
from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.text import printable
from reasonrag.core.types import WHOLE, Shard

if TYPE_CHECKING:
    from rich.console import Console

    from reasonrag.commands.console import Stop
    from reasonrag.core.config import Config
    from reasonrag.pipeline.build import Build

_PAIRS = ("pairs.min_margin", "pairs.min_rollouts", "pairs.min_confidence", "pairs.reward", "pairs.test_share")


@command("build-tree")
@settings("Config", "questions.dataset", "questions.split", "questions.limit")
@settings("Config", "retrieval.corpus", "retrieval.index", "retrieval.url", "retrieval.top_k")
@settings("Config", "policy.spec", "policy.model", "policy.temperature", "judge.spec", "judge.model")
@settings("Config", "search.iterations", "value.kind", "value.rollouts", "seed", "policy.concurrency")
@rare(
    settings("Config", "questions.exclude", "questions.world_seed", "retrieval.kind", "policy.card"),
    settings("Config", "policy.chat_template", "policy.max_tokens", "format.prompts", "format.max_steps"),
    settings("Config", "search.recording", "search.lag", "search.max_calls", "search.max_children"),
    settings("Config", "search.selection", "value.alpha", *_PAIRS, "choice.prm", "choice.candidates"),
    settings("Config", "run", "policy.input_price", "policy.output_price"),
    SHARD,
)
@configuration("Config")
@out(
    "The folder of the run; the same command resumes it (default: runs/DATASET, or the next free number of it).",
    required=False,
)
@DRY_RUN
@click.option("--preview", is_flag=True, help="Build the tree of the first question and print it.")
def build_tree(
    out: Path | None,
    shard: Shard,
    dry_run: bool,
    preview: bool,
    **given: Any,
) -> None:
    """Search trees over agentic-RAG steps, value the steps by SPRE, and write preference pairs as Parquet.

    \b
    HotpotQA from the Hub and the paper's model, where there is a GPU, into runs/hotpotqa:
      reasonrag build-tree --dataset hotpotqa
    Your own files, no GPU:
      reasonrag build-tree --dataset questions.jsonl --corpus corpus.jsonl.gz --policy extractive --out runs/try
    A model on a vLLM server:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy http://127.0.0.1:8000/v1 \\
          --policy-model Qwen/Qwen2.5-7B-Instruct --out runs/hotpot
    The resolved configuration and an estimate of the cost:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy ... --input-price 0.1 --output-price 0.4 --dry-run

    If the run is killed or stopped, the same command resumes it.
    """
    from reasonrag.commands.console import Stop, error_console, log_plainly
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import dump
    from reasonrag.pipeline.build import estimate
    from reasonrag.pipeline.models import as_served

    if shard != WHOLE and out is None:
        raise click.UsageError("--shard needs --out, the folder in which all shards meet")
    config = load_config(**sources(given))
    log_plainly()
    if dry_run:
        click.echo(printable(dump(config)))
        click.echo(printable(estimate(config, out)))
        return
    stop = Stop(error_console())
    config = as_served(config, out)
    try:
        if preview:
            _preview(config, out, stop)
        else:
            sys.exit(_build(config, out, shard, stop))
    except Interrupted:
        is_kept = out is not None or not preview
        sys.exit(stop.print_resume_hint() if is_kept else 128 + stop.number)


def _build(config: Config, out: Path | None, shard: Shard, stop: Stop) -> int:
    """Build the trees, export them, and print where they are; return the exit code."""
    from reasonrag.pipeline.build import build_trees
    from reasonrag.pipeline.parts import open_parts
    from reasonrag.storage.folder import RunFolder

    parts = open_parts(config)
    if out is None:
        out = RunFolder.unnamed("-".join(dict.fromkeys(q.dataset for q in parts.questions)), config, parts.content)
        stop.console.print(f"writing to {out} (--out chooses another folder)")
    summary = build_trees(
        config, out, parts=parts, shard=shard, show=lambda build: stop.show(build.progress, build.drain)
    )
    code = _print(summary, config, out if "shards" in summary else shard.folder(out), stop)
    if shard != WHOLE and "shards" not in summary:
        print(f"shard {shard} is built; {out} is put together when all are")
    return code


def _print(summary: Mapping[str, Any], config: Config, out: Path, stop: Stop) -> int:
    """Print what a folder holds; return the exit code."""
    _print_summary(summary, out / "pairs")
    questions = summary["questions"]
    untried = questions["total"] - questions["finished"] - sum(questions["failed"].values())
    return stop.print_missing(questions["failed"], untried, most=config.run.max_failed * questions["total"])


def _preview(config: Config, out: Path | None, stop: Stop) -> None:
    """Build the first question's tree and print it. In a run's folder its calls are kept and not paid again."""
    import tempfile

    from rich.console import Console

    from reasonrag.core import event_loop
    from reasonrag.pipeline.build import Build
    from reasonrag.pipeline.parts import open_parts
    from reasonrag.storage.folder import RunFolder

    parts = open_parts(config)
    with tempfile.TemporaryDirectory() as nowhere, RunFolder.open(out or Path(nowhere), config, parts.content) as run:
        event_loop.run(_print_first_tree(Build(config, parts, run), Console(markup=False), stop))


async def _print_first_tree(build: Build, console: Console, stop: Stop) -> None:
    from reasonrag.pipeline.parts import check
    from reasonrag.pipeline.tables import tree_rows
    from reasonrag.report.terminal import drawing
    from reasonrag.report.trees import QuestionTree

    progress = build.progress
    progress.total, progress.unit = build.config.search.iterations, "iterations"
    progress.written.clear()

    def count(change: int) -> None:
        progress.done += change < 0

    try:
        await check(build.parts, wait_s=build.config.run.wait_s)
        async with stop.show(progress, build.drain):
            tree = await build.search.run(build.parts.questions[0], watch=count)
    finally:
        build.run_folder.add_seconds(progress.seconds)
        await build.parts.aclose()
    value = build.config.value
    rows = tree_rows(tree, build.parts.format, alpha=value.alpha, weighting=value.weighting)
    console.print(drawing(QuestionTree.of(rows)))


@command()
@settings("Config", *_PAIRS, "pairs.alpha", "pairs.level")
@out("A folder for the new pairs, which leaves the run unchanged (default: the run itself).", required=False)
@click.argument("run", type=PATH)
def pairs(run: Path, out: Path | None, **given: Any) -> None:
    """Derive the pairs of a finished run again, without any model call.

    What pairs compare is the default unless a flag sets it; other thresholds stay those of the run.

    \b
      reasonrag pairs runs/hotpot --min-margin 0.05
    Only pairs with two trajectories on each side and a likely order:
      reasonrag pairs runs/hotpot --min-rollouts 2 --min-confidence 0.8 --out runs/hotpot-sure
    Without the shortest-path term, in a folder of its own:
      reasonrag pairs runs/hotpot --alpha 1 --out runs/hotpot-alpha1
    """
    from reasonrag.core.settings import dump
    from reasonrag.pipeline.tables import export_pairs
    from reasonrag.storage.files import write_json, write_text
    from reasonrag.storage.folder import Folder, RunFolder, read_run

    compared: dict[str, Any] = {"pairs.alpha": None, "pairs.level": "step", "pairs.reward": "spre"}
    config, summary = read_run(run, compared | given_settings(given))
    if out is None:
        with RunFolder.open(run, config, summary["content"]) as folder:
            summary["pairs"] = export_pairs(run, config, policy=summary["policy"], config_hash=folder.config_hash)
            write_json(run / "run.json", summary)
    else:
        if out.resolve().is_relative_to(run.resolve()):
            raise RunError(f"{out} lies in the run itself; choose a folder outside of it, or omit --out")
        Folder(out, "set of pairs", "pairs.json").claim()
        summary["pairs"] = export_pairs(
            run, config, policy=summary["policy"], config_hash=summary["config_hash"], out=out
        )
        write_text(out / "config.yaml", dump(config))
        write_json(out / "pairs.json", summary["pairs"])
    _print_summary(summary, out or run / "pairs")


def _print_summary(summary: Mapping[str, Any], pairs: Path) -> None:
    from reasonrag.commands.console import table_console
    from reasonrag.core.table import Table

    table_console().print(Table("build-tree", ("", ""), list(_summary_rows(summary))).terminal())
    print(f"data set: {pairs}")
    if summary["questions"]["finished"] and not summary["pairs"]["total"]:
        print("no siblings differ enough in value to be a pair: see No pairs in docs/troubleshooting.md")


def _summary_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers of `run.json` that a person wants to see at the end."""
    questions, trees, pairs = summary["questions"], summary["trees"], summary["pairs"]
    yield "questions", f"{questions['finished']} of {questions['total']}"
    for cause, count in questions["failed"].items():
        yield f"  failed: {cause}", str(count)
    yield "nodes", str(trees["nodes"])
    if malformed := trees.get("malformed"):
        unreadable = sum(malformed.values())
        yield "steps that cannot be read", f"{unreadable} of {sum(trees['by_action'].values())}"
        for reason, count in malformed.items():
            yield f"  {reason}", str(count)
    yield "complete trajectories", str(trees["complete_trajectories"])
    if trees["mean_f1"] is not None:
        yield "  mean F1, EM", f"{trees['mean_f1']:.3f}, {trees['mean_em']:.3f}"
    if trees["iterations_without_value"]:
        yield "iterations without a value", str(trees["iterations_without_value"])
    yield "pairs", f"{pairs['total']} (train {pairs['train']}, test {pairs['test']})"
    for kind, count in pairs["by_type"].items():
        yield f"  {kind}", str(count)
    for cause, count in pairs["left_out"].items():
        yield f"  left out: {cause}", str(count)
    if trees.get("prompt_chars"):
        yield (
            "prompts that begin like others",
            f"{trees['shared_prompt_chars'] / trees['prompt_chars']:.0%} of their text",
        )
    for kind, used in summary["calls"].items():
        yield f"{kind} calls", str(used["calls"])
        if used.get("cached_of"):
            yield (
                "  served from the prefix cache",
                f"{used['cached_tokens'] / used['cached_of']:.0%} of the prompt tokens",
            )
        if used.get("prompt_tokens") or used.get("completion_tokens"):
            yield "  tokens", f"{used['prompt_tokens']} in, {used['completion_tokens']} out"
        if used.get("cost") is not None:
            yield "  cost", f"{used['cost']:.2f}"
    yield "seconds", f"{summary['seconds']:.1f}"
