"""Questions to trees to pairs to shards: the body of `build-tree`.

Questions are admitted through a window and replaced as they finish, never in lockstep. A question that a backend lets
down is set aside with its cause and tried again by the next run; everything that it paid for is in the journal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import structlog

from reasonrag.config import Config
from reasonrag.dpo.pairs import derive_pairs, in_test_split
from reasonrag.errors import BackendError, Interrupted, RunError
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.mcts import Evaluator, SearchSettings, Tree, TreeSearch
from reasonrag.parts import Parts, open_judge, sampling
from reasonrag.rollout.engine import Engine, gather_all
from reasonrag.runs import RunFolder, versions
from reasonrag.spre import JudgeEvaluator, RolloutEvaluator
from reasonrag.spre.rows import tree_rows
from reasonrag.tables import Row, ShardWriter, pair_schema, read_shards, tree_schema
from reasonrag.types import Question

_TREE_SHARD_ROWS = 20_000
_PAIR_SHARD_ROWS = 50_000

log = structlog.get_logger()


@dataclass(slots=True)
class Progress:
    """What is happening, for whoever shows it. Counts of this process, but `done` and `nodes` of the whole run."""

    total: int
    models: tuple[JournaledLLM, ...] = ()
    done: int = 0
    failed: int = 0
    nodes: int = 0
    pairs: int = 0
    done_before: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def calls(self) -> int:
        """Requests sent by this process."""
        return sum(model.sent for model in self.models)

    @property
    def seconds(self) -> float:
        """Since this process started."""
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first question is done."""
        paced = self.done + self.failed - self.done_before
        return self.seconds / paced * (self.total - self.done - self.failed) if paced else None


class Build:
    """One run of `build-tree`."""

    def __init__(self, config: Config, parts: Parts, run: RunFolder) -> None:
        self.config = config
        self.parts = parts
        self.run_folder = run
        self.policy = JournaledLLM(parts.policy, run.journal, kind="policy")
        self.judge = JournaledLLM(parts.judge, run.journal, kind="judge") if parts.judge else None
        self.progress = Progress(len(parts.questions), tuple(m for m in (self.policy, self.judge) if m))
        self.search = make_search(config, parts, self.policy, self.judge)

    def drain(self) -> None:
        """Let calls in flight end and begin no other; `trees` then returns."""
        self.run_folder.journal.draining = True

    async def trees(self) -> None:
        """Build every tree that the journal has not got yet.

        Raises:
            RunError: the journal cannot be written, or more than `run.max_failed` of the questions failed already.
        """
        journal = self.run_folder.journal
        finished = journal.finished()
        todo = [q for q in self.parts.questions if (q.dataset, q.id) not in finished]
        self._count_finished(finished)
        waiting = iter(todo)
        workers = min(self.config.run.concurrency, len(todo))
        await gather_all(self._work(waiting) for _ in range(workers))

    async def _work(self, waiting: Iterator[Question]) -> None:
        for question in waiting:
            if self.run_folder.journal.draining or self._too_many_failed():
                return
            await self._build(question)

    async def _build(self, question: Question) -> None:
        journal, value = self.run_folder.journal, self.config.value
        try:
            tree = await self.search.run(question)
            rows = tree_rows(tree, self.parts.format, alpha=value.alpha, weighting=value.weighting)
            await journal.put_tree(question.dataset, question.id, rows)
        except Interrupted:
            return
        except RunError:
            raise
        except Exception as error:
            cause = error.cause if isinstance(error, BackendError) else f"bug:{type(error).__name__}"
            log.warning("question set aside", question=question.id, cause=cause, error=str(error)[:300])
            await journal.put_failure(question.dataset, question.id, cause, str(error)[:300])
            self.progress.failed += 1
            return
        self.progress.done += 1
        self.progress.nodes += len(rows)
        self.progress.pairs += sum(1 for _ in self._pairs(rows))

    def _count_finished(self, finished: set[tuple[str, str]]) -> None:
        for question in self.parts.questions:
            if (question.dataset, question.id) in finished:
                self.progress.done += 1
        self.progress.done_before = self.progress.done

    def _too_many_failed(self) -> bool:
        return self.progress.failed > self.config.run.max_failed * self.progress.total

    def _pairs(self, rows: Sequence[Row]) -> Iterator[Row]:
        pairs = self.config.pairs
        return derive_pairs(
            rows,
            policy=self.policy.name,
            config_hash=self.run_folder.config_hash,
            min_margin=pairs.min_margin,
            reward=pairs.reward,
        )

    def export(self) -> dict[str, Any]:
        """Write trees, pairs and `run.json` from the journal alone; returns what `run.json` holds."""
        folder = self.run_folder
        writer = ShardWriter(folder.path / "trees", "nodes", tree_schema(), shard_rows=_TREE_SHARD_ROWS)
        for row in self._rows():
            writer.add(row)
        writer.close()
        pairs = export_pairs(folder.path, self.config, policy=self.policy.name, config_hash=folder.config_hash)
        summary = self._summary(pairs)
        folder.write_summary(summary)
        return summary

    def _rows(self) -> Iterator[Row]:
        for question in self.parts.questions:
            yield from self.run_folder.journal.tree(question.dataset, question.id) or ()

    def _summary(self, pairs: dict[str, Any]) -> dict[str, Any]:
        journal = self.run_folder.journal
        seconds = (journal.meta("seconds") or 0.0) + self.progress.seconds
        journal.put_meta("seconds", seconds)
        usage = journal.usage()
        prices = {"policy": self.config.policy, "judge": self.config.judge}
        calls = {
            kind: {
                "calls": used.calls,
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "calls_without_token_counts": used.unknown_tokens,
                "cost": prices[kind].cost(used.prompt_tokens, used.completion_tokens) if kind in prices else None,
            }
            for kind, used in usage.items()
        }
        return {
            "questions": {
                "total": len(self.parts.questions),
                "finished": len(journal.finished()),
                "failed": Counter(cause for _, _, cause, _ in journal.failures()),
            },
            "trees": count_nodes(self._rows()),
            "pairs": pairs,
            "calls": calls,
            "seconds": round(seconds, 3),
            "seed": self.config.seed,
            "config_hash": self.run_folder.config_hash,
            "content": self.parts.content,
            "policy": self.policy.name,
            "judge": self.judge.name if self.judge else None,
            "versions": versions(),
        }


def make_search(config: Config, parts: Parts, policy: JournaledLLM, judge: JournaledLLM | None) -> TreeSearch:
    """Introduce engine, evaluator and search to each other."""
    engine = Engine(
        policy,
        parts.retriever,
        parts.format,
        max_steps=config.format.max_steps,
        top_k=config.retrieval.top_k,
        sampling=sampling(config.policy),
    )
    evaluator: Evaluator
    if judge is not None:
        evaluator = JudgeEvaluator(open_judge(judge, config))
    else:
        evaluator = RolloutEvaluator(engine, k=config.value.rollouts, alpha=config.value.alpha)
    settings = SearchSettings(**config.search.model_dump())
    return TreeSearch(engine, evaluator, settings, seed=config.seed)


def export_pairs(run: Path, config: Config, *, policy: str, config_hash: str) -> dict[str, Any]:
    """Derive pairs from a run's tree tables and write both splits; no model is called.

    Returns:
        Counts: total, by split, by type of chosen and rejected, by depth; the median margin.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    settings = config.pairs
    writers = {
        name: ShardWriter(run / "pairs", name, pair_schema(), shard_rows=_PAIR_SHARD_ROWS) for name in ("train", "test")
    }
    types: Counter[str] = Counter()
    depths: Counter[int] = Counter()
    questions: set[tuple[str, str]] = set()
    margins: list[float] = []
    nodes = read_shards(run / "trees", "nodes", tree_schema())
    for pair in derive_pairs(
        nodes, policy=policy, config_hash=config_hash, min_margin=settings.min_margin, reward=settings.reward
    ):
        question = (pair["dataset"], pair["question_id"])
        writers["test" if in_test_split(*question, settings.test_share) else "train"].add(pair)
        types[f"{pair['chosen_type']} > {pair['rejected_type']}"] += 1
        depths[pair["depth"]] += 1
        questions.add(question)
        margins.append(pair["margin"])
    for writer in writers.values():
        writer.close()
    return {
        "total": len(margins),
        **{name: writer.rows for name, writer in writers.items()},
        "questions_with_pairs": len(questions),
        "by_type": dict(sorted(types.items())),
        "by_depth": {str(depth): count for depth, count in sorted(depths.items())},
        "median_margin": median(margins) if margins else None,
        "min_margin": settings.min_margin,
        "reward": settings.reward,
    }


def count_nodes(rows: Iterator[Row]) -> dict[str, Any]:
    """Counts over tree rows, and mean F1 and EM of the complete trajectories."""
    nodes = 0
    unvalued = 0
    actions: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    f1: list[float] = []
    em: list[float] = []
    for row in rows:
        nodes += 1
        if row["action"]:
            actions[row["action"]] += 1
        else:  # the root has seen every iteration
            unvalued += row["visits"] - row["valued"]
        if row["action"] == "malformed":
            malformed[row["content"]] += 1
        if row["stop_reason"]:
            ends[row["stop_reason"]] += 1
        if row["f1"] is not None:
            f1.append(row["f1"])
            em.append(row["em"])
    return {
        "nodes": nodes,
        "by_action": dict(sorted(actions.items())),
        "by_stop_reason": dict(sorted(ends.items())),
        "malformed": dict(sorted(malformed.items())),
        "iterations_without_value": unvalued,
        "complete_trajectories": len(f1),
        "mean_f1": sum(f1) / len(f1) if f1 else None,
        "mean_em": sum(em) / len(em) if em else None,
    }


async def preview(config: Config, parts: Parts, run: RunFolder) -> Tree:
    """The tree of the first question, for a look before the whole run; its calls are journalled like any other."""
    build = Build(config, parts, run)
    return await build.search.run(parts.questions[0])
