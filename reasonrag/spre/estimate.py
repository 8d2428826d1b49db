"""Shortest Path Reward Estimation: the formula, and its value for every node of a finished tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from reasonrag.core.text import token_f1
from reasonrag.core.types import Trajectory
from reasonrag.mcts.tree import Tree

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
    return means_below(
        [node.parent for node in tree.nodes],
        [trajectory_reward(node.trajectory, alpha=alpha) for node in tree.nodes],
        [node.visits for node in tree.nodes] if weighting == "visits" else None,
    )


def means_below(
    parents: Sequence[int | None], ends: Sequence[float | None], visits: Sequence[int] | None = None
) -> list[float | None]:
    """The mean of the ends below each node of a tree; None where there is no end.

    Args:
        parents: `[N]` of each node, which come before it; None at the root.
        ends: `[N]` what the complete trajectory that ends in a node is worth; None elsewhere.
        visits: `[N]` weights of a node's children; without them every end counts once.

    Returns:
        `[N]` means, an end's own worth at an end.

    >>> means_below([None, 0, 0, 2, 2], [None, 1.0, None, 0.0, 0.5])
    [0.5, 1.0, 0.25, 0.0, 0.5]
    """
    means = list(ends)
    counts = [int(end is not None) for end in ends]
    sums = [0.0] * len(ends)
    weights = [0] * len(ends)
    for node in reversed(range(len(ends))):
        if ends[node] is None and weights[node]:
            means[node] = sums[node] / weights[node]
        parent, mean = parents[node], means[node]
        if parent is not None and mean is not None:
            weight = counts[node] if visits is None else visits[node]
            counts[parent] += counts[node]
            weights[parent] += weight
            sums[parent] += weight * mean
    return means
