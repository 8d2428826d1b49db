"""Monte Carlo tree search over steps: select, expand, evaluate, backpropagate (arXiv:2505.14069, sec. 2.2.2, App. A).

A tree holds many trajectories that share prefixes. The search of one question is sequential and depends on (seed,
question id) alone; throughput comes from many questions at once. Any `Evaluator` values the nodes: SPRE by rollouts or
a judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from reasonrag.core.config import SearchConfig
from reasonrag.core.types import Question, Step, Trajectory
from reasonrag.rollout import Engine, derive_seed


class Origin(StrEnum):
    """How a node came into the tree."""

    ROOT = "root"
    EXPANSION = "expansion"
    ROLLOUT = "rollout"  # a step of a completion made to value a node above it (Eq. 1): paid for, so kept


@dataclass(slots=True)
class Node:
    """A state: the trajectory up to here and the statistics of the search. The only mutable domain type.

    `visits` is N(s) of Eq. 7. `value_sum / valued` is Q(s); `valued` counts the visits that had a value to back up,
    fewer than `visits` if the judge could not be parsed or a rollout ended without an answer.
    """

    id: int
    parent: int | None
    trajectory: Trajectory
    origin: Origin
    children: list[int] = field(default_factory=list)
    visits: int = 0
    valued: int = 0
    value_sum: float = 0.0

    @property
    def depth(self) -> int:
        return len(self.trajectory.steps)

    @property
    def step(self) -> Step | None:
        """The last step; None at the root."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None

    @property
    def terminal(self) -> bool:
        """Whether the trajectory has ended, with or without an answer."""
        return self.trajectory.stop_reason is not None

    @property
    def value(self) -> float | None:
        """Q(s): the mean of the values backed up through this node; None while there is none."""
        return self.value_sum / self.valued if self.valued else None


class Tree:
    """Nodes by id, in the order of their creation; node 0 is the root."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.nodes = [Node(0, None, Trajectory(question), Origin.ROOT)]

    @property
    def root(self) -> Node:
        return self.nodes[0]

    def add(self, parent: Node, trajectory: Trajectory, origin: Origin) -> Node:
        """Add a child to `parent`; `trajectory` is the parent's with one more step."""
        node = Node(len(self.nodes), parent.id, trajectory, origin)
        self.nodes.append(node)
        parent.children.append(node.id)
        return node

    def children(self, node: Node) -> list[Node]:
        return [self.nodes[child] for child in node.children]

    def path_up(self, node: Node) -> Iterator[Node]:
        """Yield the node, its parent, ... and the root."""
        while True:
            yield node
            if node.parent is None:
                return
            node = self.nodes[node.parent]


def puct(value: float, visits: int, sibling_visits: int, parent_visits: int, c_uct: float) -> float:
    """Return `Q + c * sqrt(sum of N over the siblings, itself included) / (1 + N)` (arXiv:2505.14069, eq. 5).

    >>> puct(0.5, 1, 4, 4, c_uct=1.0)
    1.5
    """
    return value + c_uct * math.sqrt(sibling_visits) / (1 + visits)


def ucb1(value: float, visits: int, sibling_visits: int, parent_visits: int, c_uct: float) -> float:
    """Return `Q + c * sqrt(ln N_parent / N)`; an unvisited child comes first (Kocsis & Szepesvari 2006, [74] there).

    >>> ucb1(0.5, 1, 1, 1, c_uct=1.0)
    0.5
    """
    return value + c_uct * math.sqrt(math.log(max(parent_visits, 1)) / visits) if visits else math.inf


SELECTIONS: dict[str, Callable[[float, int, int, int, float], float]] = {"puct": puct, "ucb1": ucb1}


def select_child(parent: Node, children: Sequence[Node], *, selection: str, c_uct: float) -> Node:
    """Return the child with the highest score, the oldest one among equals.

    A child without a value (the judge could not be parsed, no answer) gets its parent's, so that a failure neither
    attracts the search nor repels it.
    """
    score = SELECTIONS[selection]
    unknown = parent.value if parent.value is not None else 0.0
    total = sum(child.visits for child in children)
    return max(
        children,
        key=lambda c: score(c.value if c.value is not None else unknown, c.visits, total, parent.visits, c_uct),
    )


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
    """Values a new node: by rollouts, by a judge, or by any rule of yours."""

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
