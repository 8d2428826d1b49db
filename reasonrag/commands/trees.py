"""`build-tree` and `pairs`: trees, and the preference pairs that are derived from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
from reasonrag.core.errors import RunError
from reasonrag.core.text import printable
from reasonrag.core.types import WHOLE, Shard

_PAIRS = (
    *("pairs.rule", "pairs.min_margin", "pairs.min_confidence", "pairs.path_share", "pairs.per_question"),
    *("pairs.reward", "pairs.test_share"),
)


@command("build-tree")
@settings("Config", "questions.dataset", "questions.split", "questions.limit")
@settings("Config", "retrieval.corpus", "retrieval.index", "retrieval.url", "retrieval.top_k")
@settings("Config", "policy.spec", "policy.model", "policy.temperature", "judge.spec", "judge.model")
@settings("Config", "search.iterations", "value.kind", "value.rollouts", "outcome.name", "seed", "policy.concurrency")
@rare(
    settings("Config", "questions.exclude", "questions.world_seed", "retrieval.kind", "policy.card"),
    settings("Config", "policy.chat_template", "policy.max_tokens", "format.name", "format.prompts"),
    settings("Config", "format.open_tags", "format.max_steps", "search.recording", "search.lag", "search.max_calls"),
    settings("Config", "search.max_children", "search.selection", "value.alpha", "completer.spec", "completer.model"),
    settings("Config", "outcome.votes", "pairs.confirm", *_PAIRS, "choice.prm", "choice.candidates"),
    settings("Config", "search.search_function", "run", "policy.input_price", "policy.output_price"),
    SHARD,
)
@configuration("Config")
@out(
    "The folder of the run; the same command resumes it (default: runs/DATASET, or the next free number of it).",
    required=False,
)
@DRY_RUN
def build_tree(out: Path | None, shard: Shard, dry_run: bool, **given: Any) -> None:
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
      reasonrag build-tree --dataset hotpotqa --limit 1000 --input-price 0.1 --output-price 0.4 --dry-run

    If the run is killed or stopped, the same command resumes it.
    """
    from reasonrag.commands.console import Stop, error_console, log_plainly, open_tracker
    from reasonrag.core.config import load_config
    from reasonrag.core.settings import dump
    from reasonrag.storage.files import require_json
    from reasonrag.storage.folder import RunFolder, finished, mark_finished

    if shard != WHOLE and out is None:
        raise click.UsageError("--shard needs --out, the folder in which all shards meet")
    config = load_config(**sources(given))
    log_plainly()
    if not dry_run and shard == WHOLE and (folder := finished(out, "build-tree", config)):
        _print_summary(require_json(folder / "run.json"), folder / "pairs")
        return
    from reasonrag.pipeline.build import build_trees, estimate
    from reasonrag.pipeline.parts import as_served, open_parts

    if dry_run:
        click.echo(printable(dump(config) + "\n" + estimate(config)))
        return
    stop, track = Stop(error_console()), open_tracker(config.run.report_to)
    # A server knows its model, and whether it is vLLM; both are part of what is written into the folder.
    served = as_served(config, out)
    parts = open_parts(served)
    if out is None:
        datasets = dict.fromkeys(question.dataset for question in parts.questions)
        out = RunFolder.unnamed("-".join(datasets), served, parts.content)
        stop.console.print(f"writing to {out} (--out chooses another folder)")
    with stop.resumable():
        summary = build_trees(
            served, out, parts=parts, shard=shard, show=lambda build: stop.show(build.progress, build.drain)
        )
    # The last shard to finish puts the run together, and then prints the numbers of all shards.
    is_whole = shard == WHOLE or "shards" in summary
    _print_summary(summary, (out if is_whole else shard.folder(out)) / "pairs")
    track(out, {name: summary[name] for name in ("questions", "trees", "pairs", "calls", "seconds")})
    if not is_whole:
        print(f"shard {shard} is built; {out} is put together when all are")
    questions = summary["questions"]
    if questions["finished"] == questions["total"] and shard == WHOLE:
        mark_finished(out, "build-tree", config)
    counts = (questions["failed"], questions["finished"], questions["total"])
    sys.exit(stop.print_missing(*counts, max_failed=config.run.max_failed))


@command()
@settings("Config", *_PAIRS, "pairs.alpha", "pairs.level")
@out("A run of its own with the same trees and the new pairs (default: the run itself changes).", required=False)
@click.argument("run", type=PATH)
def pairs(run: Path, out: Path | None, **given: Any) -> None:
    """Derive the pairs of a finished run again, without any model call.

    What pairs compare is the default unless a flag sets it; other thresholds stay those of the run.

    \b
      reasonrag pairs runs/hotpot --min-margin 0.05
    Only pairs with a likely order:
      reasonrag pairs runs/hotpot --min-confidence 0.8 --out runs/hotpot-sure
    Without the shortest-path term, in a folder of its own:
      reasonrag pairs runs/hotpot --alpha 1 --out runs/hotpot-alpha1
    """
    from reasonrag.pipeline.tables import export_pairs, link_trees
    from reasonrag.storage.files import write_json
    from reasonrag.storage.folder import RunFolder, read_run, write_config

    # What the run compared is not kept: a flag that is not given
    # has its default, or the pairs would depend on history.
    compared: dict[str, Any] = {"pairs.alpha": None, "pairs.level": "step", "pairs.reward": "spre"}
    config, summary = read_run(run, compared | given_settings(given))
    if out is not None and out.resolve().is_relative_to(run.resolve()):
        raise RunError(f"{out} lies in the run itself; choose a folder outside of it, or omit --out")
    with RunFolder(out or run, config, summary["content"]).open(configures=False) as folder:
        if out is not None:
            folder.bind()
            link_trees(out, [run])
        summary["pairs"] = export_pairs(folder.path, config, policy=summary["policy"], config_hash=folder.config_hash)
        write_json(folder.path / "run.json", summary)
        write_config(folder.path, config)  # after the tables, of which a kill leaves those before
    _print_summary(summary, folder.path / "pairs")


def _print_summary(summary: Mapping[str, Any], pairs: Path) -> None:
    from reasonrag.commands.console import table_console
    from reasonrag.core.table import Table

    table_console().print(Table("", ("", ""), list(_summary_rows(summary))).terminal())
    print(f"data set: {pairs}")
    count, left_out = summary["pairs"], summary["pairs"]["left_out"]
    if summary["questions"]["finished"] and not count["total"]:
        without = summary["trees"]["iterations_without_value"]
        why = "no siblings differ in value" + (f", which {without} iterations lack" if without else "")
        if left_out:
            why = f"all are left out, most for {max(left_out, key=left_out.get)}"
        print(f"no pairs: {why}; see No pairs, and Steps that cannot be read, in docs/troubleshooting.md")
    elif count["total"] and not count["test"] and (share := count.get("test_share")):
        print(f"no question with pairs is in the test split (--test-share {share:g}), so no pair is held out")


def _summary_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers of `run.json` that a person wants to see at the end; `show RUN` prints all."""
    questions, trees, pairs = summary["questions"], summary["trees"], summary["pairs"]
    yield "questions", f"{questions['finished']} of {questions['total']}"
    yield from _counts("  failed: ", questions["failed"])
    yield "nodes", str(trees["nodes"])
    if malformed := trees.get("malformed"):
        yield "steps that cannot be read", f"{sum(malformed.values())} of {sum(trees['by_action'].values())}"
        yield from _counts("  ", malformed)
    yield "complete trajectories", str(trees["complete_trajectories"])
    if trees["mean_f1"] is not None:
        yield "  mean F1, EM", f"{trees['mean_f1']:.3f}, {trees['mean_em']:.3f}"
    if trees.get("mean_outcome") is not None:
        unknown = f"{trees['unknown_outcomes']} without a verdict"
        yield f"  mean {summary['outcome']}", f"{trees['mean_outcome']:.3f}, {unknown}"
    if trees["iterations_without_value"]:
        yield "iterations without a value", str(trees["iterations_without_value"])
    yield "pairs", f"{pairs['total']} (train {pairs['train']}, test {pairs['test']})"
    yield from _counts("  ", pairs["by_type"])
    yield from _counts("  left out: ", pairs["left_out"])
    for kind, used in summary["calls"].items():
        yield f"{kind} calls", str(used["calls"])
        if used.get("prompt_tokens") or used.get("completion_tokens"):
            yield "  tokens", f"{used['prompt_tokens']} in, {used['completion_tokens']} out"
        if used.get("cost") is not None:
            yield "  cost", f"{used['cost']:.2f}"
    yield "seconds", f"{summary['seconds']:.1f}"


def _counts(label: str, counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name, count in counts.items():
        yield label + name, str(count)
