"""Questions to trees to tables: the body of `build-tree`.

As many questions are in work as keep the engines busy (`pipeline.admission`), never in lockstep. A question whose
backend fails is set aside with its cause and retried by the next run; every call that was paid for is in the journal.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core import event_loop
from reasonrag.core.config import Config
from reasonrag.core.errors import InputError, Interrupted, RunError
from reasonrag.core.text import common_length, duration, exact_match, pace, token_f1
from reasonrag.core.types import Action, Answer, Malformed, Note, Question, Search, Step
from reasonrag.formats import Format, open_format
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.mcts import Evaluator, Node, Tree, TreeSearch
from reasonrag.pipeline.admission import work_through
from reasonrag.pipeline.pair_tables import count_pairs_of, export_pairs
from reasonrag.pipeline.parts import (
    Parts,
    check,
    open_engine,
    open_judge,
    open_parts,
    open_questions,
    open_retriever,
    set_aside,
)
from reasonrag.pipeline.progress import Progress
from reasonrag.pipeline.served import as_served
from reasonrag.pipeline.shards import finish
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.rollout import callable_in_notebooks
from reasonrag.spre import JudgeEvaluator, PRMEvaluator, RolloutEvaluator, Weighting, node_rewards
from reasonrag.storage.files import RUNS, write_json
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, ShardWriter, pack, unpack
from reasonrag.storage.runs import RunFolder, read_run, versions
from reasonrag.storage.shards import WHOLE, Shard, cut
from reasonrag.storage.tables import tree_schema

_TREE_SHARD_ROWS = 20_000
_WRITTEN = 60  # tokens of a step, as most formats and models write them
_PROMPT = ["prompt", "prefix"]
_COUNTED = ["action", "content", "stop_reason", "visits", "valued", "f1", "em"]


@callable_in_notebooks
def build_trees(
    config: Config,
    out: Path | str,
    *,
    parts: Parts | None = None,
    shard: Shard = WHOLE,
    show: Callable[[Build], AbstractAsyncContextManager[object]] | None = None,
) -> dict[str, Any]:
    """Search a tree for each question and write nodes and preference pairs into a folder, as `build-tree` does.

    The same call resumes a run that was stopped or killed, and pays again for nothing but calls that were in flight.

    Args:
        config: from `load_config`.
        out: the folder of the run.
        parts: from `open_parts`, for example with a retriever or a policy of yours; closed at the end.
        shard: the part of the questions to build. The last shard that finishes puts the run together.
        show: returns a context manager that is entered while trees are built; it may read `Build.progress` and call
            `Build.drain`.

    Returns:
        The content of `run.json`: counts of questions, nodes, pairs, calls and failures by cause. It is that of the
        shard until all shards have finished, then that of the run, with their number as `shards`.

    Raises:
        Interrupted: `Build.drain` was called; everything paid for is kept.
        ConfigError, DataError, RunError: bad input, or a folder that cannot be used.
    """
    if parts is None:
        config = as_served(config, Path(out))
        parts = open_parts(config)
    parts = replace(parts, questions=cut(parts.questions, shard.of)[shard.number])
    with RunFolder.open(Path(out), config, parts.content, shard=shard) as run:
        return build_folder(run, parts, show)


def build_folder(
    run: RunFolder, parts: Parts, show: Callable[[Build], AbstractAsyncContextManager[object]] | None = None
) -> dict[str, Any]:
    """Build what `build_trees` builds in a folder that is open: `parts.questions` are those of its shard."""
    build = Build(run.config, parts, run)
    event_loop.run(build.run(show))
    run.journal.admit()
    summary = build.export()
    return summary if run.shard == WHOLE else finish(run, summary)


class Build:
    """One run of `build-tree`: `trees` calls the models, `export` writes what the journal holds."""

    def __init__(self, config: Config, parts: Parts, run: RunFolder) -> None:
        self.config = config
        self.parts = parts
        self.run_folder = run
        self.progress = Progress(len(parts.questions), "questions", written=Counter(nodes=0, pairs=0))
        self.policy = JournaledLLM(parts.policy, run.journal, kind="policy", concurrency=config.policy.concurrency)
        self.progress.open(self.policy, config.prices["policy"])
        self.engines = [self.policy.slots]
        retriever = BatchedRetriever.of_run(parts.retriever, run.journal)
        engine = open_engine(config, self.policy, retriever, parts.format, parts.scorer)
        evaluator: Evaluator
        if config.value.kind == "prm" and parts.scorer is not None:
            evaluator = PRMEvaluator(parts.scorer, alpha=config.value.alpha)
        elif parts.judge is None:
            evaluator = RolloutEvaluator(engine, k=config.value.rollouts, alpha=config.value.alpha)
        else:
            judge = JournaledLLM(parts.judge, run.journal, kind="judge", concurrency=config.judge.concurrency)
            self.engines.append(judge.slots)
            self.progress.open(judge, config.prices["judge"])
            evaluator = JudgeEvaluator(open_judge(judge, config))
        recorded = parts.format.trajectories if isinstance(parts.format, RecordedFormat) else {}
        self.search = TreeSearch(
            engine,
            evaluator,
            config.search,
            seed=config.seed,
            recorded=lambda question: recorded.get((question.dataset, question.id), ()),
        )

    async def run(self, show: Callable[[Build], AbstractAsyncContextManager[object]] | None = None) -> None:
        """Check the parts, build the trees while `show` shows them, and close the parts."""
        async with contextlib.aclosing(self.parts):
            await check(self.parts, begun=self.run_folder.begun, wait_s=self.config.run.wait_s)
            async with show(self) if show else contextlib.nullcontext():
                await self.trees()

    def drain(self) -> None:
        """Finish the calls in flight and begin no others; `trees` then returns."""
        self.run_folder.journal.drain()

    async def trees(self) -> None:
        """Build every tree that is not in the journal yet; stop once more than `run.max_failed` questions failed.

        Raises:
            RunError: the journal cannot be written, or too few of the policy's first steps can be read.
        """
        journal = self.run_folder.journal
        finished_questions = journal.finished()
        unfinished = [q for q in self.parts.questions if (q.dataset, q.id) not in finished_questions]
        self.progress.done = self.progress.done_before = len(self.parts.questions) - len(unfinished)
        self.progress.planned = len(unfinished) * self.config.search.iterations
        self.run_folder.bind()
        try:
            await work_through(self._waiting(unfinished), self._work, self.engines, stall_s=self.config.stall_s)
        finally:
            self.run_folder.add_seconds(self.progress.seconds)

    def _waiting(self, unfinished: Sequence[Question]) -> Iterator[Question]:
        """Yield the questions that are still to be begun, until the run is stopped or too many have failed."""
        for question in unfinished:
            too_many_failed = self.progress.failed > self.config.run.max_failed * self.progress.total
            if self.run_folder.journal.ended_by is not None or too_many_failed:
                return
            yield question

    async def _work(self, question: Question) -> None:
        journal, value = self.run_folder.journal, self.config.value
        left, begun = self.config.search.iterations, 0

        def count(change: int) -> None:
            nonlocal left, begun
            begun += change
            self.progress.begun += change
            if change < 0:
                left -= 1
                self.progress.iterations += 1

        try:
            tree = await self.search.run(question, watch=count)
            rows = tree_rows(tree, self.parts.format, alpha=value.alpha, weighting=value.weighting)
            await journal.put_tree(question.dataset, question.id, pack(rows, tree_schema()))
        except (Interrupted, RunError) as end:
            left = 0  # these are still to be done
            if isinstance(end, RunError):
                raise
            return
        except Exception as error:
            cause = set_aside(question, error, self.progress)
            await journal.put_failure(question.dataset, question.id, cause, str(error))
            return
        finally:
            self.progress.planned -= left  # a tree may end before its iterations do
            self.progress.begun -= begun
        self.progress.done += 1
        self.progress.written["nodes"] += len(rows)
        self.progress.written["pairs"] += count_pairs_of(rows, self.config)

    def export(self) -> dict[str, Any]:
        """Write `trees/`, `pairs/` and `run.json` from the journal alone, so that it can be repeated at any time.

        Returns:
            The content of `run.json`.
        """
        run, config, parts = self.run_folder, self.config, self.parts
        causes = {(dataset, question_id): cause for dataset, question_id, cause, _ in run.journal.failures()}
        failed = Counter(causes[q.dataset, q.id] for q in parts.questions if (q.dataset, q.id) in causes)
        trees = export_trees(run, parts.questions)
        summary = {
            "questions": {
                "total": len(parts.questions),
                "finished": trees["questions"],
                "failed": dict(sorted(failed.items())),
            },
            "trees": trees,
            "pairs": export_pairs(run.path, config, policy=parts.policy.name, config_hash=run.config_hash),
            "calls": count_calls(run.journal, config),
            "seconds": round(run.facts().get("seconds", 0.0), 3),
            "seed": config.seed,
            "config_hash": run.config_hash,
            "content": parts.content,
            "policy": parts.policy.name,
            "judge": parts.judge.name if parts.judge else None,
            **({"prm": parts.scorer.name} if parts.scorer else {}),
            "versions": versions(),
        }
        write_json(run.path / "run.json", summary)
        return summary


def tree_rows(tree: Tree, format: Format, *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return `[len(tree.nodes)]` rows of `tables.tree_schema` by node id, with each node's SPRE."""
    rewards = node_rewards(tree, alpha=alpha, weighting=weighting)
    return [_node_row(tree.question, node, rewards[node.id], format) for node in tree.nodes]


def _node_row(question: Question, node: Node, reward: float | None, format: Format) -> Row:
    trajectory = node.trajectory
    answer = trajectory.answer
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "node_id": node.id,
        "parent_id": -1 if node.parent is None else node.parent,
        "depth": node.depth,
        "origin": node.origin.value,
        "stage": format.stage(trajectory.steps).value,
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
        **_step_columns(node.step),
        "visits": node.visits,
        "valued": node.valued,
        "value": node.value,
        "spre": reward,
        "f1": None if answer is None else token_f1(answer, question.golden_answers),
        "em": None if answer is None else exact_match(answer, question.golden_answers),
    }


def _step_columns(step: Step | None) -> Row:
    """Return the columns that describe the step that led to a node."""
    if step is None:
        return {"action": "", "content": "", "prompt": [], "prefix": "", "stop": [], "text": "", "passages": []}
    completion, prompt = step.completion, step.prompt
    action, content = label(step.action)
    return {
        "action": action,
        "content": content,
        "prompt": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "prefix": prompt.prefix,
        "stop": list(prompt.stop),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "token_ids": completion.token_ids and list(completion.token_ids),
        "logprobs": completion.logprobs and list(completion.logprobs),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "passages": [{"id": p.id, "contents": p.contents, "score": p.score} for p in step.passages],
    }


def label(action: Action) -> tuple[str, str]:
    """Return the name of an action in tables and reports, and the text inside its tag."""
    match action:
        case Search(query):
            return "query", query
        case Note(evidence):
            return "evidence", evidence or "None"
        case Answer(answer):
            return "answer", answer
        case Malformed(reason):
            return "malformed", reason


def export_trees(run: RunFolder, questions: Iterable[Question]) -> dict[str, Any]:
    """Write the node table, questions in their given order; return counts over its trees and rows."""
    schema = tree_schema()
    writer = ShardWriter(run.path / "trees", "nodes", schema, shard_rows=_TREE_SHARD_ROWS, keep_empty=True)
    trees = unvalued = 0
    actions, stop_reasons, malformed = Counter[str](), Counter[str](), Counter[str]()
    f1, em = Counter[float](), Counter[float]()
    chars = shared_chars = without_ids = without_logprobs = 0
    for question in questions:
        blob = run.journal.tree(question.dataset, question.id)
        if blob is None:
            continue
        trees += 1
        batch = unpack(blob, schema)
        writer.add_batch(batch)
        of_tree, shared_of_tree = prompt_chars(batch.select(_PROMPT).to_pylist())
        chars += of_tree
        shared_chars += shared_of_tree
        without_ids += batch.column("token_ids").null_count - 1  # the root has none
        without_logprobs += batch.column("logprobs").null_count - 1
        for row in batch.select(_COUNTED).to_pylist():
            if row["action"]:
                actions[row["action"]] += 1
            else:  # every iteration visits the root, so its counts are those of the tree
                unvalued += row["visits"] - row["valued"]
            if row["action"] == "malformed":
                malformed[row["content"]] += 1
            if row["stop_reason"]:
                stop_reasons[row["stop_reason"]] += 1
            if row["f1"] is not None:
                f1[row["f1"]] += 1
                em[row["em"]] += 1
    writer.close()
    return {
        "questions": trees,
        "nodes": writer.rows,
        "by_action": dict(sorted(actions.items())),
        "by_stop_reason": dict(sorted(stop_reasons.items())),
        "malformed": dict(sorted(malformed.items())),
        "prompt_chars": chars,
        "shared_prompt_chars": shared_chars,
        "without_token_ids": without_ids,
        "without_logprobs": without_logprobs,
        "iterations_without_value": unvalued,
        "complete_trajectories": f1.total(),
        "mean_f1": fmean(f1.elements()) if f1 else None,
        "mean_em": fmean(em.elements()) if em else None,
    }


def prompt_chars(rows: Iterable[Row]) -> tuple[int, int]:
    """Return the characters of a tree's prompts, and how many of them a perfect prefix cache would serve.

    Such a cache forgets nothing, so the order of the calls does not matter: what a text of a sorted list shares with
    any text before it, it shares with its neighbour. System texts count as served, because all questions share them.

    Args:
        rows: columns `prompt` and `prefix` of its nodes.
    """
    texts = []
    for row in rows:
        if row["prompt"]:
            system, *messages = (message["content"] for message in row["prompt"])
            texts.append((system, "\0".join([*messages, row["prefix"]])))
    chars = shared = 0
    before = ""
    for system, rest in sorted(texts):
        text = f"{system}\0{rest}"
        chars += len(text)
        shared += max(common_length(before, text), len(system))
        before = text
    return chars, shared


def count_calls(journal: Journal, config: Config) -> dict[str, Any]:
    """Return calls, tokens and cost by kind of call, over all processes that worked on the run."""
    prices = config.prices
    calls: dict[str, Any] = {}
    for kind, used in journal.usage().items():
        calls[kind] = {"calls": used.calls}
        if kind in prices:  # a search has no tokens
            calls[kind] |= {
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "calls_without_token_counts": used.unknown_tokens,
                "cached_tokens": used.cached_tokens,
                "cached_of": used.cached_of,
                "cost": prices[kind].cost(used.prompt_tokens, used.completion_tokens),
            }
    return calls


def estimate(config: Config, out: Path | None = None) -> str:
    """Return in words the calls, tokens, cost and time that a run needs at most. Calls no model.

    The time follows from the pace of the calls in `out`, or in the newest finished run in runs/ of the same policy.
    """
    questions = open_questions(config)
    format = open_format(config)
    search, steps = config.search, config.format.max_steps
    expansions = search.iterations
    rollout_steps = expansions * config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 0
    judgements = expansions if config.value.kind == "judge" else 0
    per_question = (expansions + rollout_steps) * config.choice.candidates
    if search.max_calls is not None:
        last = config.value.rollouts * max(steps - 1, 0) if config.value.kind == "rollout" else 1
        judgements = min(judgements, search.max_calls)
        per_question = min(per_question, search.max_calls + last)
    sample = [format.prompt(question, ()) for question in questions[:100]]
    prompt_chars = sum(len(m.content) for p in sample for m in p.messages) / len(sample)
    passage_chars = event_loop.run(_passage_chars(config, questions[:20]))
    # About 4 characters a token; every second step shows passages; thoughts grow by about 60 tokens a step.
    prompt_tokens = (prompt_chars + passage_chars / 2) / 4 + 60 * steps / 2
    calls = len(questions) * per_question
    written = {role: min(_WRITTEN, model.max_tokens) for role, model in config.prices.items()}
    millions = calls * (prompt_tokens + written["policy"]) / 1e6
    lines = [
        f"{len(questions)} questions; at most {per_question} policy calls and {judgements} judge calls each",
        f"at most {calls} policy calls and {len(questions) * judgements} judge calls; early ends save most of them",
        f"about {prompt_tokens:.0f} prompt tokens and {written['policy']} written ones a call: {millions:.1f} M tokens "
        f"at most (--max-tokens allows {config.policy.max_tokens} written ones)",
    ]
    for role, count in (("policy", calls), ("judge", len(questions) * judgements)):
        cost = config.prices[role].cost(round(count * prompt_tokens), count * written[role])
        if count and cost is not None:
            lines.append(f"{role} cost at most {cost:.2f}")
    measured = _measured_pace(config, out)
    if measured is None:
        lines.append("time: known once calls were made; --preview with --out makes some, which the run does not repeat")
    else:
        folder, made, seconds = measured
        time = duration(calls * seconds / made)
        lines.append(f"time: at most {time} at {pace(made, seconds, 'call')}, as in {folder}")
    return "\n".join(lines)


def _measured_pace(config: Config, out: Path | None) -> tuple[Path, int, float] | None:
    """Return a folder with calls of the same policy, their number and the seconds that they took; None if none has."""
    if out is not None and (out / "journal.sqlite").is_file():
        with contextlib.closing(Journal(out / "journal.sqlite")) as journal:
            used = journal.usage().get("policy")
        seconds = RunFolder(out, config, {}).facts().get("seconds")
        if used and seconds:
            return out, used.calls, seconds
    for file in sorted(RUNS.rglob("run.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(InputError):
            ran, summary = read_run(file.parent)
            made, seconds = summary.get("calls", {}).get("policy", {}).get("calls"), summary.get("seconds")
            if made and seconds and (ran.policy.spec, ran.policy.model) == (config.policy.spec, config.policy.model):
                return file.parent, made, seconds
    return None


async def _passage_chars(config: Config, questions: list[Question]) -> float:
    """Return the mean characters of one search's passages. A server is not asked: its passages count as 100 words."""
    if config.retrieval.is_remote:
        return 600.0 * config.retrieval.top_k
    async with contextlib.aclosing(open_retriever(config, questions)) as retriever:
        found = await retriever.search([q.question for q in questions], config.retrieval.top_k)
    shown = [min(len(p.contents), config.retrieval.max_passage_chars) for passages in found for p in passages]
    return sum(shown) / max(len(found), 1)
