"""Monte Carlo tree search over steps: select, expand, evaluate, backpropagate (arXiv:2505.14069, sec. 2.2.2, App. A).

The search of one question is sequential and depends on (seed, question id) alone; throughput comes from many questions
at once. Any `Evaluator` values the nodes: SPRE by rollouts or a judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reasonrag.mcts.selection import Selection, select_child
from reasonrag.mcts.tree import Node, Origin, Tree
from reasonrag.rollout.engine import Engine, derive_seed
from reasonrag.types import Question, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluator found.

    Args:
        value: in [0, 1]; None where there is none (no rollout ended with an answer, the judge could not be read).
        rollouts: finished continuations of the trajectory that were made on the way; the tree keeps them.
        rollout_values: `[len(rollouts)]` what each is worth by itself, None where it has no answer.
    """

    value: float | None
    rollouts: tuple[Trajectory, ...] = ()
    rollout_values: tuple[float | None, ...] = ()


class Evaluator(Protocol):
    """Values a new node."""

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        """The value of the trajectory so far, finished or not.

        Raises:
            LLMError, RetrievalError: a backend gave up; an unreadable judge is a missing value, not an error.
        """
        ...


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Budget and shape of a tree.

    Args:
        iterations: visits to the root at most.
        max_children: per node.
        selection: "puct" (Eq. 5) or "ucb1".
        c_uct: exploration weight.
        rejudge_terminal: value a terminal node anew at each visit, and use the whole budget, as the published builder
            does; by default a terminal node keeps its value and a tree with nothing left to expand is finished.
    """

    iterations: int = 64
    max_children: int = 3
    selection: Selection = "puct"
    c_uct: float = 1.414
    rejudge_terminal: bool = False


class TreeSearch:
    """Builds one tree per question."""

    def __init__(self, engine: Engine, evaluator: Evaluator, settings: SearchSettings, *, seed: int = 0) -> None:
        self.engine = engine
        self.evaluator = evaluator
        self.settings = settings
        self.seed = seed

    async def run(self, question: Question) -> Tree:
        """The finished tree of a question.

        Raises:
            LLMError, RetrievalError: a backend gave up. Calls made until then are in the journal, if there is one.
        """
        tree = Tree(question)
        for _ in range(self.settings.iterations):
            if not self.settings.rejudge_terminal and not any(map(self._expandable, tree.nodes)):
                break
            node = self._select(tree)
            if self._expandable(node):
                node = await self._expand(tree, node)
                value = await self._evaluate(tree, node)
            elif self.settings.rejudge_terminal:
                value = await self._evaluate(tree, node)
            else:
                value = node.value
            backpropagate(tree, node, value)
        return tree

    def _expandable(self, node: Node) -> bool:
        return not node.terminal and len(node.children) < self.settings.max_children

    def _select(self, tree: Tree) -> Node:
        """From the root down to a node that is terminal or has room for a child."""
        node = tree.root
        while not node.terminal and not self._expandable(node):
            node = select_child(node, tree.children(node), selection=self.settings.selection, c_uct=self.settings.c_uct)
        return node

    async def _expand(self, tree: Tree, parent: Node) -> Node:
        seed = self._seed(tree, "expand", parent.id, len(parent.children))
        return tree.add(parent, await self.engine.step(parent.trajectory, seed=seed), Origin.EXPANSION)

    async def _evaluate(self, tree: Tree, node: Node) -> float | None:
        seed = self._seed(tree, "evaluate", node.id, node.visits)
        evaluation = await self.evaluator.evaluate(node.trajectory, seed=seed)
        for rollout, value in zip(evaluation.rollouts, evaluation.rollout_values, strict=True):
            graft(tree, node, rollout, value)
        return evaluation.value

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
    """One visit for every node from here to the root (arXiv:2505.14069, eq. 7), and the value where there is one."""
    for ancestor in tree.path_up(node):
        _visit(ancestor, value)


def _visit(node: Node, value: float | None) -> None:
    node.visits += 1
    if value is not None:
        node.valued += 1
        node.value_sum += value
