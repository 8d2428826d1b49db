"""Monte Carlo tree search over steps: select, expand, evaluate, backpropagate (arXiv:2505.14069, sec. 2.2.2, App. A).

A tree holds many trajectories that share prefixes. The iterations of the paper's search follow one another, so that a
tree would keep an engine busy with little more than one call at a time. Here up to `lag` iterations are in flight while
the next one selects. The tree depends on seed, question and lag alone, never on which call ends first. Any `Evaluator`
values the nodes: SPRE by rollouts or a judge.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from reasonrag.core.config import SearchConfig
from reasonrag.core.types import Question, Step, Trajectory
from reasonrag.llm.base import Caller, caller
from reasonrag.rollout import Engine, derive_seed


class Origin(StrEnum):
    """How a node came into the tree."""

    ROOT = "root"
    EXPANSION = "expansion"
    RECORDED = "recorded"  # a step that somebody else's agent took
    ROLLOUT = "rollout"  # a step of a completion made to value a node above it (Eq. 1): paid for, so kept


@dataclass(slots=True)
class Node:
    """A state: the trajectory up to here and the statistics of the search. The only mutable domain type.

    `visits` is N(s) of Eq. 7. `value_sum / valued` is Q(s); `valued` counts the visits that had a value to back up,
    fewer than `visits` if the judge could not be parsed, a rollout ended without an answer, or the visit is still in
    flight. `expected` counts the children in flight.
    """

    id: int
    parent: int | None
    trajectory: Trajectory
    origin: Origin
    children: list[int] = field(default_factory=list)
    expected: int = 0
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
    unknown = parent.value or 0.0
    total = sum([child.visits for child in children])
    scores = []
    for child in children:
        value = child.value_sum / child.valued if child.valued else unknown
        scores.append(score(value, child.visits, total, parent.visits, c_uct))
    return children[scores.index(max(scores))]


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


@dataclass(slots=True)
class _Iteration:
    """An iteration in flight: the node that it selected, and the task that makes and values the node below it.

    There is no task if the node has ended and keeps its value. `expands` says whether a child is being made.
    """

    selected: Node
    expands: bool
    task: asyncio.Task[tuple[Trajectory, Evaluation]] | None


class TreeSearch:
    """Builds one tree per question, within a budget of iterations and of calls.

    `lag`: iteration j selects when at most `lag` iterations before it are in flight, and sees exactly the backups of
    the others. Those in flight count as visits without a value on the nodes they passed (virtual visits; Chaslot et al.
    2008, "Parallel Monte-Carlo Tree Search"), and hold the places of the children they make. They are completed in the
    order in which they began, and an iteration that finds no place waits for the next of them, so that the tree does
    not depend on time. 0 is the search of the paper.

    `max_calls`: no iteration begins once the tree has cost so many calls. These are its nodes except the root (each is
    a step that the policy was asked for, once for each candidate, those of rollouts too) and its judge's verdicts, a
    retried one counted once; replies from a journal count like new ones. An iteration in flight counts as the mean of
    those before it, and those that have begun are completed: with a judge a tree costs at most
    `max_calls + 1 + 2 * lag`, with k rollouts of at most T steps `max_calls + (k * (T - 1) + 1) * (lag + 1) - 1`.

    `recorded`: finished trajectories to begin a question's tree with. Each of their steps is branched, up to
    `max_children`, before the search goes its own way; they cost no call.

    `rejudge_terminal`: value a terminal node again at each visit and use the whole budget, as the published builder
    does. By default a terminal node keeps its value, and a tree with nothing left to expand is finished.
    """

    def __init__(
        self,
        engine: Engine,
        evaluator: Evaluator,
        settings: SearchConfig,
        *,
        seed: int = 0,
        recorded: Callable[[Question], Sequence[Trajectory]] = lambda question: (),
    ) -> None:
        self.engine = engine
        self.evaluator = evaluator
        self.settings = settings
        self.seed = seed
        self.recorded = recorded

    async def run(self, question: Question, *, watch: Callable[[int], object] = int) -> Tree:
        """Return the finished tree of a question; call `watch` with 1 as an iteration begins, with -1 as it ends.

        Raises:
            LLMError, RetrievalError: a backend gave up. The iterations in flight have ended then, and their calls are
                in the journal, if there is one.
        """
        search = _Search(self, question, watch)
        try:
            await search.run()
        finally:
            await search.end()
        return search.tree


class _Search:
    """The search of one question."""

    def __init__(self, shared: TreeSearch, question: Question, watch: Callable[[int], object]) -> None:
        self.engine = shared.engine
        self.evaluator = shared.evaluator
        self.settings = shared.settings
        self.seed = shared.seed
        self.tree = Tree(question)
        self.verdicts = 0
        self.completed = 0
        self.watch = watch
        self.in_flight: deque[_Iteration] = deque()
        self.recorded = shared.recorded(question)

    async def run(self) -> None:
        for number, trajectory in enumerate(self.recorded):
            evaluation = await self.evaluator.evaluate(trajectory, seed=self._seed("recorded", number, 0))
            self.verdicts += evaluation.calls
            graft(self.tree, self.tree.root, trajectory, evaluation.value, Origin.RECORDED)
            self.tree.root.visits += 1
            _back_up(self.tree.root, evaluation.value)
        for _ in range(self.settings.iterations):
            while len(self.in_flight) > self.settings.lag:
                await self._complete()
            selected = self._select()
            while selected is None and self.in_flight:
                await self._complete()
                selected = self._select()
            if selected is None:
                return
            self._begin(selected)
        while self.in_flight:
            await self._complete()

    async def end(self) -> None:
        """Wait for the iterations in flight after a failure: what they pay for is kept. Cancel them if this is."""
        tasks = [iteration.task for iteration in self.in_flight if iteration.task]
        if (task := asyncio.current_task()) and task.cancelling():
            for each in tasks:
                each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _select(self) -> Node | None:
        """Walk from the root down to a node that is terminal or has room for a child.

        None if there is none in view: the tree is finished, its calls are spent, or what is in flight has to end first.
        """
        newest_first = reversed(self.tree.nodes)  # the newest most likely has room
        if self._spent() or not (self.settings.rejudge_terminal or any(map(self._expandable, newest_first))):
            return None
        if self.recorded:
            recorded = [node for node in self.tree.nodes if node.origin in (Origin.ROOT, Origin.RECORDED)]
            if branched := [node for node in recorded if self._expandable(node)]:
                return min(branched, key=lambda node: len(node.children) + node.expected)
        node = self.tree.root
        while not node.terminal and not self._expandable(node):
            if not node.children:  # all of them are in flight
                return None
            children = self.tree.children(node)
            node = select_child(node, children, selection=self.settings.selection, c_uct=self.settings.c_uct)
        return node

    def _spent(self) -> bool:
        """Return whether the calls are used up, or would be if those in flight cost as much as those before them."""
        if self.settings.max_calls is None:
            return False
        calls = (len(self.tree.nodes) - 1) * self.engine.candidates + self.verdicts
        expected = len(self.in_flight) * (calls / self.completed if self.completed else 1)
        return calls + expected >= self.settings.max_calls

    def _expandable(self, node: Node) -> bool:
        return not node.terminal and len(node.children) + node.expected < self.settings.max_children

    def _begin(self, selected: Node) -> None:
        """Visit the nodes above, without a value yet, and start the calls of an iteration."""
        # Trees with the fewest iterations behind them come first, or the last ones would end long after the others.
        caller.set(Caller(f"{self.tree.question.dataset}/{self.tree.question.id}", self.completed))
        expands = self._expandable(selected)
        task = None
        if expands:
            slot = len(selected.children) + selected.expected
            # The least id that the child can get; no other one is in flight under it, and without a lag it is the id.
            child = len(self.tree.nodes) + sum(iteration.expands for iteration in self.in_flight)
            seeds = self._seed("expand", selected.id, slot), self._seed("evaluate", child, 0)
            task = asyncio.create_task(self._expand(selected.trajectory, *seeds))
            selected.expected += 1
        elif self.settings.rejudge_terminal:
            seed = self._seed("evaluate", selected.id, selected.visits)
            task = asyncio.create_task(self._evaluate(selected.trajectory, seed))
        for node in self.tree.path_up(selected):
            node.visits += 1
        self.in_flight.append(_Iteration(selected, expands, task))
        self.watch(1)

    async def _expand(self, trajectory: Trajectory, seed: int, evaluation_seed: int) -> tuple[Trajectory, Evaluation]:
        return await self._evaluate(await self.engine.step(trajectory, seed=seed), evaluation_seed)

    async def _evaluate(self, trajectory: Trajectory, seed: int) -> tuple[Trajectory, Evaluation]:
        return trajectory, await self.evaluator.evaluate(trajectory, seed=seed)

    async def _complete(self) -> None:
        """Wait for the iteration that began first, add its nodes, and back up its value (arXiv:2505.14069, eq. 7)."""
        iteration = self.in_flight[0]
        node, value = iteration.selected, iteration.selected.value
        if iteration.task is not None:
            trajectory, evaluation = await iteration.task
            value = evaluation.value
            self.verdicts += evaluation.calls
            if iteration.expands:
                node.expected -= 1
                node = self.tree.add(node, trajectory, Origin.EXPANSION)
                node.visits = 1
            for rollout, rollout_value in zip(evaluation.rollouts, evaluation.rollout_values, strict=True):
                graft(self.tree, node, rollout, rollout_value)
        self.in_flight.popleft()
        self.completed += 1
        for ancestor in self.tree.path_up(node):
            _back_up(ancestor, value)
        self.watch(-1)

    def _seed(self, *parts: int | str) -> int:
        # Data set and id: two merged data sets may both have a question "1".
        question = self.tree.question
        return derive_seed(self.seed, question.dataset, question.id, *parts)


def graft(tree: Tree, node: Node, rollout: Trajectory, value: float | None, origin: Origin = Origin.ROLLOUT) -> None:
    """Add the steps of a rollout below the node that it started from, each visited once, by this rollout."""
    for depth in range(node.depth + 1, len(rollout.steps) + 1):
        ended = depth == len(rollout.steps)
        prefix = Trajectory(rollout.question, rollout.steps[:depth], rollout.stop_reason if ended else None)
        node = tree.add(node, prefix, origin)
        node.visits = 1
        _back_up(node, value)


def _back_up(node: Node, value: float | None) -> None:
    """Add a value to a visit that was counted before; None leaves the mean as it is."""
    if value is not None:
        node.valued += 1
        node.value_sum += value
