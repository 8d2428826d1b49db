"""A finished tree as rows of `tables.tree_schema`: everything that pairs, reports and exports need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from reasonrag.core.text import exact_match, token_f1
from reasonrag.core.types import Action, Answer, Malformed, Note, Search
from reasonrag.formats.base import Format
from reasonrag.mcts.tree import Node, Tree
from reasonrag.spre.estimate import Weighting, means_below, node_rewards
from reasonrag.storage.parquet import Row


def tree_rows(tree: Tree, format: Format, *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """`[len(tree.nodes)]` rows by node id, with each node's SPRE."""
    rewards = node_rewards(tree, alpha=alpha, weighting=weighting)
    return [_row(tree, node, rewards[node.id], format) for node in tree.nodes]


def revalued(tree: Sequence[Row], *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """The rows of one tree, in order of their ids, with SPRE at another alpha: no new search is needed for that."""
    rewards = means_below(
        [None if row["parent_id"] < 0 else row["parent_id"] for row in tree],
        [None if row["f1"] is None else row["f1"] * alpha ** row["depth"] for row in tree],
        [row["visits"] for row in tree] if weighting == "visits" else None,
    )
    return [{**row, "spre": reward} for row, reward in zip(tree, rewards, strict=True)]


def _row(tree: Tree, node: Node, reward: float | None, format: Format) -> Row:
    question = tree.question
    answer = node.trajectory.answer
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "node_id": node.id,
        "parent_id": -1 if node.parent is None else node.parent,
        "depth": node.depth,
        "origin": node.origin.value,
        "stage": format.stage(node.trajectory.steps).value,
        "stop_reason": node.trajectory.stop_reason and node.trajectory.stop_reason.value,
        **_decision(node),
        "visits": node.visits,
        "valued": node.valued,
        "value": node.value,
        "spre": reward,
        "f1": None if answer is None else token_f1(answer, question.golden_answers),
        "em": None if answer is None else exact_match(answer, question.golden_answers),
    }


def _decision(node: Node) -> Row:
    """The columns that describe the step that led to a node."""
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
    """The name of an action in tables and reports, and what stands inside its tag."""
    match action:
        case Search(query):
            return "query", query
        case Note(evidence):
            return "evidence", evidence or "None"
        case Answer(answer):
            return "answer", answer
        case Malformed(reason):
            return "malformed", reason
