"""Shortest Path Reward Estimation (SPRE): the formula, its value for every node of a tree, and three evaluators.

An evaluator values a new node while the tree grows: by rollouts, which SPRE scores, by a process reward model, or by
one judge call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from reasonrag.core.errors import JudgeError, LLMError
from reasonrag.core.text import token_f1
from reasonrag.core.types import Trajectory
from reasonrag.llm.base import StepScorer
from reasonrag.mcts import Evaluation, Tree
from reasonrag.rollout import Engine, derive_seed

if TYPE_CHECKING:
    from reasonrag.rewards.judge import ProcessJudge

Weighting = Literal["trajectories", "visits"]


def spre(correctness: Sequence[float], lengths: Sequence[int], *, alpha: float) -> float:
    """Return the mean correctness of the rollouts, discounted by path length (arXiv:2505.14069, eq. 1).

    Args:
        correctness: `[K]` one score in [0, 1] per rollout, K >= 1.
        lengths: `[K]` actions from the root to each rollout's answer.
        alpha: decay per action, in (0, 1].

    Raises:
        ValueError: `scores` is empty, or there are not as many lengths as scores.

    >>> spre([1.0, 0.0], [2, 5], alpha=0.5)
    0.125
    """
    if not correctness:
        raise ValueError("SPRE of no rollout is undefined: leave the value missing")
    scores = [v * alpha**n for v, n in zip(correctness, lengths, strict=True)]
    return sum(scores) / len(scores)


def trajectory_reward(trajectory: Trajectory, *, alpha: float) -> float | None:
    """Return `F1(answer, gold) * alpha**steps` of one complete trajectory; None if it has no final answer."""
    if not trajectory.complete:
        return None
    correctness = token_f1(trajectory.answer, trajectory.question.golden_answers)
    return spre([correctness], [len(trajectory.steps)], alpha=alpha)


def node_rewards(tree: Tree, *, alpha: float, weighting: Weighting = "trajectories") -> list[float | None]:
    """Return SPRE of every node, over the complete trajectories through it (arXiv:2505.14069, eq. 1, sec. 2.2.3).

    A node with no final answer below it has None, never 0: it takes part in no pair.

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
    """Return the mean of the ends below each node of a tree; None for a node with no end below it.

    Args:
        parents: `[N]` parent of each node, which comes before it; None at the root.
        ends: `[N]` reward of the complete trajectory that ends in a node; None for other nodes.
        visits: `[N]` weights of a node's children; without them every end counts once.

    Returns:
        `[N]` means; at an end, its own reward.

    >>> means_below([None, 0, 0, 2, 2], [None, 1.0, None, 0.0, 0.5])
    [0.5, 1.0, 0.25, 0.0, 0.5]
    """
    means = list(ends)
    counts = [int(end is not None) for end in ends]
    sums = [0.0] * len(ends)
    weights = [0] * len(ends)
    # Children come after their parents, so going backwards a node's sums are complete when it is reached.
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


class RolloutEvaluator:
    """Values a node by SPRE over `k` completions of its trajectory (arXiv:2505.14069, eq. 1).

    Completions that end without an answer have no correctness and do not count in the mean.
    """

    def __init__(self, engine: Engine, *, k: int = 2, alpha: float = 0.9) -> None:
        self.engine = engine
        self.k = k
        self.alpha = alpha

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        if trajectory.stop_reason is not None:  # it has ended: nothing to complete
            return Evaluation(trajectory_reward(trajectory, alpha=self.alpha))
        seeds = [derive_seed(seed, i) for i in range(self.k)]
        rollouts = await self.engine.run([trajectory] * self.k, seeds=seeds)
        rewards = [trajectory_reward(rollout, alpha=self.alpha) for rollout in rollouts]
        known = [reward for reward in rewards if reward is not None]
        return Evaluation(sum(known) / len(known) if known else None, tuple(rollouts), tuple(rewards))


class PRMEvaluator:
    """Values a node by a process reward model, without a rollout or a call; one that has ended by its known reward."""

    def __init__(self, scorer: StepScorer, *, alpha: float = 0.9) -> None:
        self.scorer = scorer
        self.alpha = alpha

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        if trajectory.stop_reason is not None:
            return Evaluation(trajectory_reward(trajectory, alpha=self.alpha))
        step = trajectory.steps[-1]
        (value,) = await self.scorer.score([(step.prompt, step.completion)])
        if not 0 <= value <= 1:  # of a scorer of the user's
            raise LLMError(f"{self.scorer.name} values a step at {value}; values are in [0, 1]", cause="bad_value")
        return Evaluation(value)


class JudgeEvaluator:
    """Values a node by one judge call that sees the golden answers (arXiv:2505.14069, eq. 6). Guides the search only.

    The value is None if the judge's replies could not be parsed; the judge counts these.
    """

    def __init__(self, judge: ProcessJudge) -> None:
        self.judge = judge

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        try:
            return Evaluation(await self.judge.score(trajectory, seed=seed), calls=1)
        except JudgeError:
            return Evaluation(None, calls=1)
