"""Shortest Path Reward Estimation (SPRE): the formula, its value for every node of a tree, and three evaluators.

An evaluator values a new node while the tree grows: by rollouts, which SPRE scores, by a process reward
model, or by one judge call. `check_tree` holds a written tree to the same formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from reasonrag.core.errors import DataError, JudgeError, LLMError
from reasonrag.core.text import token_f1
from reasonrag.core.types import Trajectory
from reasonrag.llm.base import StepScorer
from reasonrag.mcts.search import Evaluation, Tree
from reasonrag.rewards.judge import JudgeService, process_score
from reasonrag.rollout import Engine, derive_seed
from reasonrag.storage.parquet import Row

Weighting = Literal["trajectories", "visits"]

_SCORES = ("value", "spre", "f1", "em")
# The columns that `check_tree` reads, and the names of the question.
SHAPE = ("dataset", "question_id", "question", "node_id", "parent_id", "depth", "visits", "valued", *_SCORES, "grade")
_ROUNDING = 1e-9


def spre(correctness: Sequence[float], lengths: Sequence[int], *, alpha: float) -> float:
    """Return the mean correctness of the rollouts, discounted by path length (arXiv:2505.14069, eq. 1).

    Args:
        correctness: `[K]` one score in [0, 1] per rollout, K >= 1.
        lengths: `[K]` actions from the root to each rollout's answer.
        alpha: decay per action, in (0, 1].

    Raises:
        ValueError: `correctness` is empty, or there are not as many lengths as scores.

    >>> spre([1.0, 0.0], [2, 5], alpha=0.5)
    0.125
    """
    if not correctness:
        raise ValueError("SPRE of no rollout is undefined: leave the value missing")
    discounted = [score * alpha**length for score, length in zip(correctness, lengths, strict=True)]
    return sum(discounted) / len(discounted)


def trajectory_reward(trajectory: Trajectory, *, alpha: float) -> float | None:
    """Return `outcome * alpha**steps` of one complete trajectory; None if it has no final answer, or no known outcome.

    The outcome is the grade of the answer, or token F1 if nothing graded it.
    """
    if not trajectory.complete:
        return None
    grade, golden_answers = trajectory.grade, trajectory.question.golden_answers
    worth = token_f1(trajectory.answer, golden_answers) if grade is None else grade.value
    return None if worth is None else spre([worth], [len(trajectory.steps)], alpha=alpha)


def outcome_of(row: Row) -> float | None:
    """Return the outcome of the answer of a row of `tables.tree_schema`; None without an answer or a verdict on it."""
    grade = row.get("grade")
    outcome: float | None = row["f1"] if grade is None else grade["value"]
    return outcome


def node_rewards(tree: Tree, *, alpha: float, weighting: Weighting = "trajectories") -> list[float | None]:
    """Return SPRE of every node, over the complete trajectories through it (arXiv:2505.14069, eq. 1, sec. 2.2.3).

    A node with no final answer below it has None, never 0: it takes part in no pair.

    Args:
        tree: a finished tree.
        alpha: decay per action, in (0, 1].
        weighting: "trajectories" is the mean over complete trajectories, each counted once; "visits" is
            the published builder's rule, children weighted by their visit counts.

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
    ends_below = [int(reward is not None) for reward in ends]
    # Over the children of each node: weight times mean, and weight.
    sums, weights = [0.0] * len(ends), [0] * len(ends)
    # Children come after their parents, so going backwards a node's sums are complete when it is reached.
    for node in reversed(range(len(ends))):
        if ends[node] is None and weights[node]:
            means[node] = sums[node] / weights[node]
        parent, mean = parents[node], means[node]
        if parent is not None and mean is not None:
            # Weighted by the ends below them, the means of children add up to the mean over all ends.
            weight = ends_below[node] if visits is None else visits[node]
            ends_below[parent] += ends_below[node]
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
        seeds = [derive_seed(seed, number) for number in range(self.k)]
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

    def __init__(self, judge: JudgeService) -> None:
        self.judge = judge

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        try:
            return Evaluation(await process_score(self.judge, trajectory, seed=seed), calls=1)
        except JudgeError as error:
            if isinstance(error.__cause__, LLMError):  # it does not answer: the question is set aside, as for a policy
                raise error.__cause__ from None
            return Evaluation(None, calls=1)


def check_tree(
    rows: Sequence[Row],
    *,
    where: str = "the rows",
    fully: bool = False,
    alpha: float | None = None,
    weighting: Weighting | None = None,
) -> None:
    """Check that a question's rows are one tree: ids count from 0, and each node is one step below an earlier one.

    Every node but the root then has exactly one parent, which exists and is
    older, so the graph is connected and has no cycle. Scores have to be in [0,
    1]. `fully` checks also that each value is of as many visits as had one, and
    SPRE, if the `alpha` of the run is known, by the answers below each node.

    Args:
        rows: of `tables.tree_schema`, of one question, by id.
        where: the rows' origin, for the message.
        fully: whether to check how values were computed.
        alpha: as SPRE was computed.
        weighting: as SPRE was computed.

    Raises:
        DataError: they are not a tree; the message names the question and the node.
    """
    if not rows:
        raise DataError(f"{where}: a tree has no node, not even a root")
    # In this order: values are computed along the parents.
    problems = chain(_misplaced(rows), _misvalued(rows, alpha, weighting) if fully else ())
    for node, problem in problems:
        raise DataError(
            f"{where}: question {rows[0]['question_id']!r}, node {node}: {problem}, so this is not a tree that "
            "build-tree wrote; run the same build-tree command to write the tables again"
        )


def _misplaced(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    for position, row in enumerate(rows):
        node, parent, depth = row["node_id"], row["parent_id"], row["depth"]
        if node != position:
            yield node, f"it comes twice or nodes before it are missing (it is row {position} of the tree)"
            return  # ids are positions in the checks below
        if node == 0 and (parent, depth) != (-1, 0):
            yield node, f"it is the first, but has a parent, {parent}, or a depth, {depth}"
        if node > 0 and not 0 <= parent < node:
            yield node, "it is a second root" if parent == -1 else f"its parent, {parent}, does not come before it"
        elif node > 0 and depth != rows[parent]["depth"] + 1:
            yield node, f"it is at depth {depth}, and its parent, {parent}, at {rows[parent]['depth']}"
        for name in _SCORES:
            if row[name] is not None and not -_ROUNDING <= row[name] <= 1 + _ROUNDING:
                yield node, f"its {name}, {row[name]}, is not in [0, 1]"
        if not 0 <= (outcome_of(row) or 0) <= 1 + _ROUNDING:
            yield node, f"the grade of its answer, {row.get('grade')}, is not in [0, 1]"


def _misvalued(rows: Sequence[Row], alpha: float | None, weighting: Weighting | None) -> Iterator[tuple[int, str]]:
    for row in rows:
        if not 0 <= row["valued"] <= row["visits"] or (row["value"] is None) != (row["valued"] == 0):
            yield row["node_id"], f"its value, {row['value']}, is of {row['valued']} of {row['visits']} visits"
    if alpha is None:
        return
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in rows]
    rewards = [None if (worth := outcome_of(row)) is None else worth * alpha ** row["depth"] for row in rows]
    visits = [row["visits"] for row in rows] if weighting == "visits" else None
    for row, expected in zip(rows, means_below(parents, rewards, visits), strict=True):
        written = row["spre"]
        if (expected is None) != (written is None) or abs((expected or 0) - (written or 0)) > _ROUNDING:
            yield row["node_id"], f"its spre is {written}, and by the answers below it {expected}"
