"""Monte Carlo tree search over steps: select, expand, evaluate, backpropagate (arXiv:2505.14069, sec. 2.2.2, App. A).

The search of one question is sequential and depends on (seed, question id) alone; throughput comes from many questions
at once. Any `Evaluator` values the nodes: SPRE by rollouts or a judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reasonrag.core.config import SearchConfig
from reasonrag.core.types import Question, Trajectory
from reasonrag.mcts.selection import select_child
from reasonrag.mcts.tree import Node, Origin, Tree
from reasonrag.rollout import Engine, derive_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of a node, and the rollouts that were made for it.

    Args:
        value: in [0, 1]; None if there is none (no rollout ended with an answer, the judge could not be parsed).
        rollouts: finished continuations of the trajectory; the tree keeps them.
        rollout_values: `[len(rollouts)]` value of each by itself; None for one without an answer.
        calls: model calls beside the steps of the rollouts: 1 for a verdict, however often it was retried.
    """

    value: float | None
    rollouts: tuple[Trajectory, ...] = ()
    rollout_values: tuple[float | None, ...] = ()
    calls: int = 0


class Evaluator(Protocol):
    """Values a new node."""

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        """Return the value of the trajectory so far, finished or not.

        Raises:
            LLMError, RetrievalError: a backend gave up. An unparseable verdict is a missing value, not an error.
        """
        ...


class TreeSearch:
    """Builds one tree per question, within a budget of iterations and of calls.

    `max_calls`: no iteration begins once the tree has cost so many calls. These are its nodes except the root (each is
    a step that the policy was asked for, those of rollouts too) and its judge's verdicts, a retried one counted once;
    replies from a journal count like new ones. The last iteration is completed: with a judge a tree costs at most
    `max_calls + 1`, with k rollouts of at most T steps `max_calls + k * (T - 1)`.

    `rejudge_terminal`: value a terminal node again at each visit and use the whole budget, as the published builder
    does. By default a terminal node keeps its value, and a tree with nothing left to expand is finished.
    """

    def __init__(self, engine: Engine, evaluator: Evaluator, settings: SearchConfig, *, seed: int = 0) -> None:
        self.engine = engine
        self.evaluator = evaluator
        self.settings = settings
        self.seed = seed

    async def run(self, question: Question) -> Tree:
        """Return the finished tree of a question.

        Raises:
            LLMError, RetrievalError: a backend gave up. Calls made until then are in the journal, if there is one.
        """
        tree, verdicts = Tree(question), 0
        for _ in range(self.settings.iterations):
            if self._finished(tree, verdicts):
                break
            node = self._select(tree)
            if expandable := self._expandable(node):
                node = await self._expand(tree, node)
            value = node.value
            if expandable or self.settings.rejudge_terminal:
                evaluation = await self._evaluate(tree, node)
                value, verdicts = evaluation.value, verdicts + evaluation.calls
            backpropagate(tree, node, value)
        return tree

    def _finished(self, tree: Tree, verdicts: int) -> bool:
        """Return whether the calls are spent, or no node can get another child."""
        calls = len(tree.nodes) - 1 + verdicts
        if self.settings.max_calls is not None and calls >= self.settings.max_calls:
            return True
        return not self.settings.rejudge_terminal and not any(map(self._expandable, tree.nodes))

    def _expandable(self, node: Node) -> bool:
        return not node.terminal and len(node.children) < self.settings.max_children

    def _select(self, tree: Tree) -> Node:
        """Walk from the root down to a node that is terminal or has room for a child."""
        node = tree.root
        while not node.terminal and not self._expandable(node):
            node = select_child(node, tree.children(node), selection=self.settings.selection, c_uct=self.settings.c_uct)
        return node

    async def _expand(self, tree: Tree, parent: Node) -> Node:
        seed = self._seed(tree, "expand", parent.id, len(parent.children))
        return tree.add(parent, await self.engine.step(parent.trajectory, seed=seed), Origin.EXPANSION)

    async def _evaluate(self, tree: Tree, node: Node) -> Evaluation:
        seed = self._seed(tree, "evaluate", node.id, node.visits)
        evaluation = await self.evaluator.evaluate(node.trajectory, seed=seed)
        for rollout, value in zip(evaluation.rollouts, evaluation.rollout_values, strict=True):
            graft(tree, node, rollout, value)
        return evaluation

    def _seed(self, tree: Tree, *parts: int | str) -> int:
        # Data set and id: two merged data sets may both have a question "1".
        return derive_seed(self.seed, tree.question.dataset, tree.question.id, *parts)


def graft(tree: Tree, node: Node, rollout: Trajectory, value: float | None) -> None:
    """Add the steps of a rollout below the node that it started from, each visited once, by this rollout."""
    for depth in range(node.depth + 1, len(rollout.steps) + 1):
        ended = depth == len(rollout.steps)
        prefix = Trajectory(rollout.question, rollout.steps[:depth], rollout.stop_reason if ended else None)
        node = tree.add(node, prefix, Origin.ROLLOUT)
        _visit(node, value)


def backpropagate(tree: Tree, node: Node, value: float | None) -> None:
    """Add one visit to every node from here to the root (arXiv:2505.14069, eq. 7), and the value if there is one."""
    for ancestor in tree.path_up(node):
        _visit(ancestor, value)


def _visit(node: Node, value: float | None) -> None:
    node.visits += 1
    if value is not None:
        node.valued += 1
        node.value_sum += value
