"""Trees to the rows of `tables.tree_schema`, and a run's journal to Parquet.

Nothing here calls a model: tables are a pure function of what the journal holds, and pairs of the node tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.text import exact_match, token_f1
from reasonrag.core.types import Action, Answer, Malformed, Note, Question, Search
from reasonrag.dpo.pairs import derive_pairs, derive_trajectory_pairs, in_test_split
from reasonrag.formats.base import Format
from reasonrag.mcts import Node, Tree
from reasonrag.spre import Weighting, means_below, node_rewards
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, ShardWriter, read_shards
from reasonrag.storage.runs import RunFolder
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_TREE_SHARD_ROWS = 20_000
_PAIR_SHARD_ROWS = 50_000


def tree_rows(tree: Tree, format: Format, *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return `[len(tree.nodes)]` rows of `tables.tree_schema` by node id, with each node's SPRE."""
    rewards = node_rewards(tree, alpha=alpha, weighting=weighting)
    return [_node_row(tree, node, rewards[node.id], format) for node in tree.nodes]


def revalued(tree: Sequence[Row], *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return the rows of one tree with SPRE at another alpha, which needs no new search.

    Args:
        tree: rows of `tables.tree_schema` of one question, in the order of their ids.
        alpha: decay per step, in (0, 1].
        weighting: how trajectories through a node are averaged.
    """
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in tree]
    scores = [None if row["f1"] is None else row["f1"] * alpha ** row["depth"] for row in tree]
    weights = [row["visits"] for row in tree] if weighting == "visits" else None
    rewards = means_below(parents, scores, weights)
    return [{**row, "spre": reward} for row, reward in zip(tree, rewards, strict=True)]


def _node_row(tree: Tree, node: Node, reward: float | None, format: Format) -> Row:
    question = tree.question
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
        **_step_columns(node),
        "visits": node.visits,
        "valued": node.valued,
        "value": node.value,
        "spre": reward,
        "f1": None if answer is None else token_f1(answer, question.golden_answers),
        "em": None if answer is None else exact_match(answer, question.golden_answers),
    }


def _step_columns(node: Node) -> Row:
    """Return the columns that describe the step that led to a node."""
    if node.step is None:
        return {"action": "", "content": "", "prompt": [], "prefix": "", "stop": [], "text": "", "passages": []}
    completion = node.step.completion
    action, content = label(node.step.action)
    return {
        "action": action,
        "content": content,
        "prompt": [asdict(message) for message in node.step.prompt.messages],
        "prefix": node.step.prompt.prefix,
        "stop": list(node.step.prompt.stop),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "token_ids": completion.token_ids and list(completion.token_ids),
        "logprobs": completion.logprobs and list(completion.logprobs),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "passages": [asdict(passage) for passage in node.step.passages],
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


def export_trees(run: RunFolder, questions: Sequence[Question]) -> dict[str, Any]:
    """Write the node table, questions in their given order; return counts over its rows."""
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
    """Derive pairs from a run's node table and write both splits to `out` (default: the run's `pairs/`).

    Returns:
        Counts: total, by split, by type of chosen and rejected (only for pairs of steps), by depth; the median margin.

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
    """Yield the pairs that the configuration asks for.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and in the order of their ids.
        config: the run's configuration; `pairs` and `value` are used.
        policy: the policy's name, a column of every pair.
        config_hash: of the run that made the trees.
    """
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
