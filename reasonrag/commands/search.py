"""`build-tree`, `pairs` and `demo world`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from reasonrag.commands.progress import shown, summary_table
from reasonrag.commands.shell import Stop, error_console, log_plainly
from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.settings import dump
from reasonrag.core.types import Question
from reasonrag.pipeline.build import Build
from reasonrag.pipeline.export import export_pairs, tree_rows
from reasonrag.pipeline.parts import check, open_format, open_parts, open_questions, open_retriever
from reasonrag.report.terminal import drawing
from reasonrag.report.trees import QuestionTree
from reasonrag.storage.files import claim_folder, write_json, write_text
from reasonrag.storage.runs import RunFolder, read_run


def build_tree(config: Config, out: Path | None) -> int:
    """Run, export, and say where it is; returns the exit code."""
    if out is None:
        raise ConfigError("build-tree needs a folder for the run: add --out runs/NAME")
    log_plainly()
    console = error_console()
    parts = open_parts(config)
    with RunFolder.open(out, config, parts.content) as run:
        build = Build(config, parts, run)
        stop = Stop(console)
        asyncio.run(_work(build, stop))
        if stop.number:
            return stop.say_how_to_go_on()
        summary = build.export()
    Console().print(summary_table(summary))
    print(f"data set: {out / 'pairs'}")
    questions = summary["questions"]
    failed = sum(questions["failed"].values())
    if missing := questions["total"] - questions["finished"]:
        console.print(
            f"{failed} questions failed, {missing - failed} were not tried; the same command tries them again"
        )
    return int(missing > config.run.max_failed * questions["total"])


def preview(config: Config, out: Path | None) -> None:
    """Build the first question's tree and print it. With a run's folder its calls are kept and not paid again."""
    log_plainly()
    parts = open_parts(config)
    with tempfile.TemporaryDirectory() as nowhere, RunFolder.open(out or Path(nowhere), config, parts.content) as run:
        asyncio.run(_preview(Build(config, parts, run), Console(markup=False)))


def derive(run: Path, out: Path | None, overrides: dict[str, Any]) -> None:
    """Derive a run's pairs with other settings: in the run itself, noted in its files, or beside it in `out`.

    What the pairs compare is the default unless it is asked for; other thresholds stay those of the run.
    """
    _, summary = read_run(run)
    compared: dict[str, Any] = {"pairs.alpha": None, "pairs.level": "step", "pairs.reward": "spre"}
    config = load_config(file=run / "config.yaml", overrides=compared | overrides)
    if out is None:
        with RunFolder.open(run, config, summary["content"]) as folder:
            summary["pairs"] = export_pairs(run, config, policy=summary["policy"], config_hash=folder.config_hash)
            folder.write_summary(summary)
    else:
        if out.resolve().is_relative_to(run.resolve()):
            raise RunError(f"{out} lies in the run itself; choose a folder outside of it, or leave --out away")
        claim_folder(out, "set of pairs", already_ours=(out / "pairs.json").exists())
        summary["pairs"] = export_pairs(
            run, config, policy=summary["policy"], config_hash=summary["config_hash"], out=out
        )
        write_text(out / "config.yaml", dump(config))
        write_json(out / "pairs.json", summary["pairs"])
    Console().print(summary_table(summary))
    print(f"data set: {out or run / 'pairs'}")


def write_world(out: Path, world_seed: int) -> None:
    """The demo world as FlashRAG files; `train-famous` are the training questions of which a third need no search."""
    from reasonrag.demo import demo_corpus, demo_questions
    from reasonrag.demo.world import DEMO_SPLITS

    claim_folder(out, "demo world", already_ours=(out / "corpus.jsonl").exists())
    for split in DEMO_SPLITS:
        questions = demo_questions(split, seed=world_seed)
        rows = [
            {"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers), "metadata": q.metadata}
            for q in questions
        ]
        _write_jsonl(out / f"{split}.jsonl", rows)
    _write_jsonl(out / "corpus.jsonl", [{"id": p.id, "contents": p.contents} for p in demo_corpus(world_seed)])
    print(f"world: {out}")


def estimate(config: Config) -> str:
    """Calls, tokens and cost that a run would need at most, in words. Reads questions and corpus, calls no model."""
    log_plainly()
    questions = open_questions(config)
    format = open_format(config)
    search, steps = config.search, config.format.max_steps
    expansions = search.iterations
    rollout_steps = expansions * config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 0
    judgements = expansions if config.value.kind == "judge" else 0
    per_question = expansions + rollout_steps
    if search.max_calls is not None:
        last = config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 1
        judgements = min(judgements, search.max_calls)
        per_question = min(per_question, search.max_calls + last)
    sample = [format.prompt(question, ()) for question in questions[:100]]
    prompt_chars = sum(len(m.content) for p in sample for m in p.messages) / len(sample)
    passage_chars = asyncio.run(_passage_chars(config, questions[:20]))
    # About 4 characters a token; every second step shows passages; thoughts grow by about 60 tokens a step.
    prompt_tokens = (prompt_chars + passage_chars / 2) / 4 + 60 * steps / 2
    calls = len(questions) * per_question
    millions = calls * (prompt_tokens + 60) / 1e6
    lines = [
        f"{len(questions)} questions; at most {per_question} policy calls and {judgements} judge calls each",
        f"at most {calls} policy calls and {len(questions) * judgements} judge calls; early ends save most of them",
        f"about {prompt_tokens:.0f} prompt tokens and 60 written ones a call: {millions:.1f} M tokens at most",
    ]
    for role, count in (("policy", calls), ("judge", len(questions) * judgements)):
        if count and (cost := config.prices[role].cost(round(count * prompt_tokens), count * 60)) is not None:
            lines.append(f"{role} cost at most {cost:.2f}")
    return "\n".join(lines)


async def _passage_chars(config: Config, questions: list[Question]) -> float:
    """Of the passages of one search, on average; a server is not asked, its passages are taken to be 100 words."""
    if config.retrieval.url:
        return 600.0 * config.retrieval.top_k
    retriever = open_retriever(config, questions)
    try:
        found = await retriever.search([q.question for q in questions], config.retrieval.top_k)
    finally:
        await retriever.aclose()
    return sum(min(len(p.contents), config.retrieval.max_passage_chars) for ps in found for p in ps) / max(
        len(found), 1
    )


async def _work(build: Build, stop: Stop) -> None:
    try:
        async with stop.heeded(build.drain):
            await check(build.parts)
            async with shown(build.progress, stop.console):
                await build.trees()
    finally:
        await build.parts.aclose()


async def _preview(build: Build, console: Console) -> None:
    try:
        await check(build.parts)
        tree = await build.search.run(build.parts.questions[0])
    finally:
        await build.parts.aclose()
    value = build.config.value
    rows = tree_rows(tree, build.parts.format, alpha=value.alpha, weighting=value.weighting)
    console.print(drawing(QuestionTree.of(rows)))


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
