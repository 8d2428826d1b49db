"""Journal to Parquet and `run.json`: a pure function of what was paid for, so it can be done again at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import derive_pairs, in_test_split
from reasonrag.dpo.trajectories import derive_trajectory_pairs
from reasonrag.pipeline.parts import Parts
from reasonrag.pipeline.rows import revalued
from reasonrag.spre.estimate import Weighting
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, ShardWriter, read_shards
from reasonrag.storage.runs import RunFolder, versions
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_TREE_SHARD_ROWS = 20_000
_PAIR_SHARD_ROWS = 50_000


def export_run(run: RunFolder, config: Config, parts: Parts, *, seconds: float) -> dict[str, Any]:
    """Write `trees/`, `pairs/` and `run.json`; returns what `run.json` holds."""
    trees = export_trees(run, parts.questions)
    asked = {(question.dataset, question.id) for question in parts.questions}
    failed = Counter(cause for dataset, id, cause, _ in run.journal.failures() if (dataset, id) in asked)
    summary = {
        "questions": {
            "total": len(asked),
            "finished": len(run.journal.finished() & asked),
            "failed": dict(sorted(failed.items())),
        },
        "trees": trees,
        "pairs": export_pairs(run.path, config, policy=parts.policy.name, config_hash=run.config_hash),
        "calls": count_calls(run.journal, config),
        "seconds": round(seconds, 3),
        "seed": config.seed,
        "config_hash": run.config_hash,
        "content": parts.content,
        "policy": parts.policy.name,
        "judge": parts.judge.name if parts.judge else None,
        "versions": versions(),
    }
    run.write_summary(summary)
    return summary


def export_trees(run: RunFolder, questions: Sequence[Question]) -> dict[str, Any]:
    """Write the node table, questions in their given order; returns counts over it."""
    writer = ShardWriter(run.path / "trees", "nodes", tree_schema(), shard_rows=_TREE_SHARD_ROWS, keep_empty=True)
    count = _NodeCount()
    for question in questions:
        for row in run.journal.tree(question.dataset, question.id) or ():
            writer.add(row)
            count.add(row)
    writer.close()
    return count.summary()


def export_pairs(
    run: Path, config: Config, *, policy: str, config_hash: str, out: Path | None = None
) -> dict[str, Any]:
    """Derive pairs from a run's tree tables and write both splits to `out` (the run's `pairs/`); no model is called.

    Returns:
        Counts: total, by split, by type of chosen and rejected (of steps), by depth; the median margin.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    settings = config.pairs
    whole = settings.level == "trajectory"
    schema = trajectory_pair_schema() if whole else pair_schema()
    writers = {
        name: ShardWriter(out or run / "pairs", name, schema, shard_rows=_PAIR_SHARD_ROWS) for name in ("train", "test")
    }
    types: Counter[str] = Counter()
    depths: Counter[int] = Counter()
    questions: set[tuple[str, str]] = set()
    margins: list[float] = []
    nodes = read_shards(run / "trees", "nodes", tree_schema())
    for pair in pairs_of(nodes, config, policy=policy, config_hash=config_hash):
        question = (pair["dataset"], pair["question_id"])
        writers["test" if in_test_split(*question, settings.test_share) else "train"].add(pair)
        if not whole:
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
        "reward": "f1" if whole else settings.reward,
        "alpha": None if whole else settings.alpha or config.value.alpha,
        "level": settings.level,
    }


def pairs_of(nodes: Iterable[Row], config: Config, *, policy: str, config_hash: str) -> Iterator[Row]:
    """The pairs that the configuration asks for, from rows of `tables.tree_schema`, a question's together and by id."""
    settings, value = config.pairs, config.value
    if settings.level == "trajectory":
        return derive_trajectory_pairs(nodes, policy=policy, config_hash=config_hash, min_margin=settings.min_margin)
    if settings.alpha not in (None, value.alpha):
        nodes = _revalued(nodes, settings.alpha or 1.0, value.weighting)
    return derive_pairs(
        nodes, policy=policy, config_hash=config_hash, min_margin=settings.min_margin, reward=settings.reward
    )


def _revalued(nodes: Iterable[Row], alpha: float, weighting: Weighting) -> Iterator[Row]:
    for _, tree in groupby(nodes, key=lambda row: (row["dataset"], row["question_id"])):
        yield from revalued(list(tree), alpha=alpha, weighting=weighting)


def count_calls(journal: Journal, config: Config) -> dict[str, Any]:
    """Calls, tokens and cost by kind, over all the processes that worked on the run."""
    prices = config.prices
    calls: dict[str, Any] = {}
    for kind, used in journal.usage().items():
        calls[kind] = {"calls": used.calls}
        if kind in prices:  # a search has no tokens
            calls[kind] |= {
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "calls_without_token_counts": used.unknown_tokens,
                "cost": prices[kind].cost(used.prompt_tokens, used.completion_tokens),
            }
    return calls


class _NodeCount:
    """Counts over tree rows, one at a time."""

    def __init__(self) -> None:
        self.nodes = 0
        self.unvalued = 0
        self.actions: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.malformed: Counter[str] = Counter()
        self.f1: list[float] = []
        self.em: list[float] = []

    def add(self, row: Row) -> None:
        self.nodes += 1
        if row["action"]:
            self.actions[row["action"]] += 1
        else:  # the root has seen every iteration
            self.unvalued += row["visits"] - row["valued"]
        if row["action"] == "malformed":
            self.malformed[row["content"]] += 1
        if row["stop_reason"]:
            self.ends[row["stop_reason"]] += 1
        if row["f1"] is not None:
            self.f1.append(row["f1"])
            self.em.append(row["em"])

    def summary(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "by_action": dict(sorted(self.actions.items())),
            "by_stop_reason": dict(sorted(self.ends.items())),
            "malformed": dict(sorted(self.malformed.items())),
            "iterations_without_value": self.unvalued,
            "complete_trajectories": len(self.f1),
            "mean_f1": fmean(self.f1) if self.f1 else None,
            "mean_em": fmean(self.em) if self.em else None,
        }
