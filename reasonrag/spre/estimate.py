"""Shortest Path Reward Estimation: the formula, and its value for every node of a finished tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from reasonrag.mcts.tree import Node, Tree
from reasonrag.text import token_f1
from reasonrag.types import Trajectory

Weighting = Literal["trajectories", "visits"]


def spre(correctness: Sequence[float], lengths: Sequence[int], *, alpha: float) -> float:
    """Mean correctness of the rollouts, discounted by path length (arXiv:2505.14069, eq. 1).

    Args:
        correctness: `[K]` one score in [0, 1] per rollout, K >= 1.
        lengths: `[K]` actions from the root to each rollout's answer.
        alpha: decay per action, in (0, 1].

    Raises:
        ValueError: no rollout, or not as many lengths as scores.

    >>> spre([1.0, 0.0], [2, 5], alpha=0.5)
    0.125
    """
    if not correctness:
        raise ValueError("SPRE of no rollout is undefined: leave the value missing")
    scores = [v * alpha**n for v, n in zip(correctness, lengths, strict=True)]
    return sum(scores) / len(scores)


def trajectory_reward(trajectory: Trajectory, *, alpha: float) -> float | None:
    """`F1(answer, gold) * alpha**steps`: what one complete trajectory is worth; None where it has no final answer."""
    if not trajectory.complete:
        return None
    correctness = token_f1(trajectory.answer, trajectory.question.golden_answers)
    return spre([correctness], [len(trajectory.steps)], alpha=alpha)


def node_rewards(tree: Tree, *, alpha: float, weighting: Weighting = "trajectories") -> list[float | None]:
    """SPRE of every node: over the complete trajectories through it (arXiv:2505.14069, eq. 1, sec. 2.2.3).

    A node with no final answer below it has None, never 0: it is pruned from pairs.

    Args:
        tree: a finished tree.
        alpha: decay per action, in (0, 1].
        weighting: "trajectories" is the mean over complete trajectories, each counted once; "visits" is the published
            builder's rule, children weighted by their visit counts.

    Returns:
        `[len(tree.nodes)]` rewards in [0, 1], by node id.
    """
    weight: Callable[[Node], int] = (
        (lambda node: node.visits) if weighting == "visits" else (lambda node: ends[node.id])
    )
    ends = [0] * len(tree.nodes)  # complete trajectories through each node
    rewards: list[float | None] = [None] * len(tree.nodes)
    for node in reversed(tree.nodes):  # children are younger than their parents
        if node.terminal:
            rewards[node.id] = trajectory_reward(node.trajectory, alpha=alpha)
            ends[node.id] = int(rewards[node.id] is not None)
            continue
        valued = [(weight(c), r) for c in tree.children(node) if (r := rewards[c.id]) is not None]
        ends[node.id] = sum(ends[child] for child in node.children)
        if total := sum(w for w, _ in valued):
            rewards[node.id] = sum(w * r for w, r in valued) / total
    return rewards
