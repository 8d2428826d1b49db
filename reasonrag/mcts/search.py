"""Monte Carlo tree search over steps: select, expand, evaluate, backpropagate (arXiv:2505.14069, sec. 2.2.2, App. A).

A tree holds many trajectories that share prefixes. The iterations of the paper's search follow one
another, so that a tree would keep an engine busy with little more than one call at a time. Here up to
`lag` iterations are in flight while the next one selects. The tree depends on seed, question and lag
alone, never on which call ends first. Any `Evaluator` values the nodes: SPRE by rollouts or a judge.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from reasonrag.core.config import SearchConfig
from reasonrag.core.types import Question, Step, Trajectory
from reasonrag.llm.base import Caller, caller
from reasonrag.rollout import Engine, derive_seed


class Origin(StrEnum):
    """How a node came into the tree."""

    ROOT = "root"
    EXPANSION = "expansion"
    RECORDED = "recorded"  # a step of a recorded agent
    ROLLOUT = "rollout"  # a step of a completion made to value a node above it (Eq. 1): paid for, so kept
    COMPLETION = "completion"  # the same by another model than the policy: kept, and never searched or compared
    CONFIRMATION = "confirmation"  # a step of a rollout made after the search, to confirm a pair


@dataclass(slots=True)
class Node:
    """A state: the trajectory up to here and the statistics of the search. The only mutable domain type.

    `visits` is N(s) of Eq. 7. `value_sum / valued` is Q(s); `valued`
    counts the visits that had a value to back up, fewer than `visits` if
    the judge could not be parsed, a rollout ended without an answer, or
    the visit is still in flight. `expected` counts the children in flight.
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
        """Q(s): the mean of the values backed up through this node; None before the first one."""
        return self.value_sum / self.valued if self.valued else None

    def back_up(self, value: float | None) -> None:
        """Add a value to a visit that was counted before; None leaves the mean as it is."""
        if value is not None:
            self.valued += 1
            self.value_sum += value


class Tree:
    """Nodes by id, in the order of their creation; node 0 is the root. `verdicts` counts those of its judge."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.verdicts = 0
        self.nodes = [Node(0, None, Trajectory(question), Origin.ROOT)]

    @property
    def root(self) -> Node:
        return self.nodes[0]

    def add(self, parent: Node, trajectory: Trajectory, origin: Origin) -> Node:
        """Add a child to `parent`; `trajectory` is the parent's with one more step."""
        node = Node(len(self.nodes), parent.id, trajectory, origin)
        self.nodes.append(node)
        self.verdicts += trajectory.grade.calls if trajectory.grade else 0
        if origin is not Origin.COMPLETION:  # the search goes on below its policy's own steps alone
            parent.children.append(node.id)
        return node

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

    A child without a value (the judge could not be parsed, no answer) gets its parent's, so that a
    failure neither attracts the search nor repels it.
    """
    unknown = parent.value or 0.0
    total = sum([child.visits for child in children])

    def score(child: Node) -> float:
        value = child.value_sum / child.valued if child.valued else unknown
        return SELECTIONS[selection](value, child.visits, total, parent.visits, c_uct)

    return max(children, key=score)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The value of a node, and the rollouts that were made for it.

    Args:
        value: in [0, 1]; None if it is unknown (no rollout ended
            with an answer, or the judge could not be parsed).
        rollouts: finished continuations of the trajectory; the tree keeps them.
        rollout_values: `[len(rollouts)]` value of each by itself; None for one without an answer.
        calls: model calls other than the steps of the rollouts:
            1 for a verdict, however often it was retried.
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
            LLMError, RetrievalError: a backend gave up. An
                unparseable verdict is a missing value, not an error.
        """
        ...


@dataclass(eq=False)
class TreeSearch:
    """Builds one tree per question, within a budget of iterations and of calls.

    `lag`: iteration j selects when at most `lag` iterations before it are in flight, and sees
    exactly the backups of the others. Iterations in flight count as visits without a value on
    the nodes they passed (virtual visits; Chaslot et al. 2008, "Parallel Monte-Carlo Tree
    Search"), and hold the places of the children they make. They are completed in the order
    in which they began, and an iteration that finds no place waits for the next of them, so
    that the tree does not depend on time. 0 is the search of the paper.

    `max_calls`: no iteration begins once the tree has cost so many calls. These
    are its nodes except the root (each is a step of the policy, once for each
    candidate, also in rollouts) and its judge's verdicts, a retried one counted
    once; replies from a journal count like new ones. An iteration in flight
    counts as the mean of those before it, and iterations that have begun are
    completed: with a judge a tree costs at most `max_calls + 1 + 2 * lag`, with k
    rollouts of at most T steps `max_calls + (k * (T - 1) + 1) * (lag + 1) - 1`.

    `rollouts`: the origin of the steps that the evaluator returns; they are children like any other, unless it is
    `Origin.COMPLETION`.

    `recorded`: finished trajectories to begin a question's tree
    with. Each of their steps is branched, up to `max_children`,
    before the search goes its own way; they cost no call.

    `rejudge_terminal`: value a terminal node again at each visit and use the
    whole budget, as the published builder does. By default a terminal node
    keeps its value, and a tree with nothing left to expand is finished.
    """

    engine: Engine
    evaluator: Evaluator
    settings: SearchConfig
    _: KW_ONLY
    seed: int = 0
    rollouts: Origin = Origin.ROLLOUT
    recorded: Callable[[Question], Sequence[Trajectory]] = lambda question: ()

    async def run(self, question: Question, *, count: Callable[[], object] = int) -> Tree:
        """Return the finished tree of a question; call `count` as each iteration ends.

        Raises:
            LLMError, RetrievalError: a backend gave up. The iterations in flight have ended then, and
                their calls are in the journal, if there is one.
        """
        # Data set and id: two merged data sets may both have a question "1".
        seed = functools.partial(derive_seed, self.seed, question.dataset, question.id)
        tree = Tree(question)
        in_flight: deque[_Iteration] = deque()  # in the order in which they began
        completed = 0
        recorded = self.recorded(question)
        for number, trajectory in enumerate(recorded):
            trajectory = await self.engine.graded(trajectory)
            evaluation = await self.evaluator.evaluate(trajectory, seed=seed("recorded", number, 0))
            tree.verdicts += evaluation.calls
            graft(tree, tree.root, trajectory, evaluation.value, Origin.RECORDED)
            tree.root.visits += 1
            tree.root.back_up(evaluation.value)

        async def complete_oldest() -> None:
            nonlocal completed
            await self._complete(tree, in_flight[0])
            in_flight.popleft()
            completed += 1
            count()

        try:
            for _ in range(self.settings.iterations):
                while len(in_flight) > self.settings.in_flight:
                    await complete_oldest()

                # Select: from the root down, by Eq. 5, to a node that has room for a child.
                while self._is_spent(tree, in_flight, completed) or (selected := self._select(tree, recorded)) is None:
                    if not in_flight:
                        return tree  # nothing is left to expand, or the calls are spent
                    await complete_oldest()  # an iteration in flight may make room

                # Expand it by a step of the policy and value the new
                # node, in a task. A terminal node keeps its value.
                # Trees with the fewest completed iterations come
                # first, or the last ones would end long after others.
                caller.set(Caller(f"{question.dataset}/{question.id}", completed))
                task = None
                if expands := self._has_room(selected):
                    place = len(selected.children) + selected.expected
                    # The least id that the child can get. No other
                    # child in flight below `selected` has the same
                    # one, and without a lag it is the id.
                    child = len(tree.nodes) + sum(iteration.expands for iteration in in_flight)
                    seeds = seed("expand", selected.id, place), seed("evaluate", child, 0)
                    task = asyncio.create_task(self._expand(selected.trajectory, *seeds))
                    selected.expected += 1
                elif self.settings.rejudge_terminal:
                    again = seed("evaluate", selected.id, selected.visits)
                    task = asyncio.create_task(self._value(selected.trajectory, again))

                # Visit the path at once, without a value; `_complete` backs the value up (Eq. 7).
                for node in tree.path_up(selected):
                    node.visits += 1
                in_flight.append(_Iteration(selected, expands, task))
            while in_flight:
                await complete_oldest()
        finally:  # after a failure too: what the iterations in flight pay for is kept
            await _end([iteration.task for iteration in in_flight if iteration.task])
        return tree

    def _select(self, tree: Tree, recorded: Sequence[Trajectory]) -> Node | None:
        """Return the node on the best path from the root that is terminal or has room for a child.

        None if there is no such node: the tree is finished, or an iteration in flight has to end first.
        """
        newest_first = reversed(tree.nodes)  # the newest most likely has room
        if not (self.settings.rejudge_terminal or any(map(self._has_room, newest_first))):
            return None
        if recorded:
            steps = [node for node in tree.nodes if node.origin in (Origin.ROOT, Origin.RECORDED)]
            if branched := list(filter(self._has_room, steps)):
                return min(branched, key=lambda node: len(node.children) + node.expected)
        node = tree.root
        while not node.terminal and not self._has_room(node):
            if not node.children:  # all of them are in flight
                return None
            children = [tree.nodes[child] for child in node.children]
            node = select_child(node, children, selection=self.settings.selection, c_uct=self.settings.c_uct)
        return node

    def _has_room(self, node: Node) -> bool:
        is_searched = not node.terminal and node.origin is not Origin.COMPLETION
        return is_searched and len(node.children) + node.expected < self.settings.max_children

    def _is_spent(self, tree: Tree, in_flight: Collection[_Iteration], completed: int) -> bool:
        """Return whether the calls are used up, or would be if those in flight cost as much as those before them."""
        if self.settings.max_calls is None:
            return False
        calls = (len(tree.nodes) - 1) * self.engine.candidates + tree.verdicts
        expected = len(in_flight) * (calls / completed if completed else 1)
        return calls + expected >= self.settings.max_calls

    async def _expand(self, trajectory: Trajectory, seed: int, evaluation_seed: int) -> tuple[Trajectory, Evaluation]:
        return await self._value(await self.engine.step(trajectory, seed=seed), evaluation_seed)

    async def _value(self, trajectory: Trajectory, seed: int) -> tuple[Trajectory, Evaluation]:
        return trajectory, await self.evaluator.evaluate(trajectory, seed=seed)

    async def _complete(self, tree: Tree, iteration: _Iteration) -> None:
        """Wait for an iteration, add its nodes, and back up its value (arXiv:2505.14069, eq. 7)."""
        node, value = iteration.selected, iteration.selected.value
        if iteration.task is not None:
            trajectory, evaluation = await iteration.task
            value = evaluation.value
            tree.verdicts += evaluation.calls
            if iteration.expands:
                node.expected -= 1
                node = tree.add(node, trajectory, Origin.EXPANSION)
                node.visits = 1
            for rollout, rollout_value in zip(evaluation.rollouts, evaluation.rollout_values, strict=True):
                graft(tree, node, rollout, rollout_value, self.rollouts)
        for ancestor in tree.path_up(node):
            ancestor.back_up(value)


@dataclass(slots=True)
class _Iteration:
    """An iteration in flight: the node that it selected, and the task that makes and values the node below it.

    A node that has ended keeps its value, without a task. `expands` is true while a child is being made.
    """

    selected: Node
    expands: bool
    task: asyncio.Task[tuple[Trajectory, Evaluation]] | None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended; cancel them first if the current task is being cancelled."""
    current = asyncio.current_task()
    if current is not None and current.cancelling():
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def graft(tree: Tree, node: Node, rollout: Trajectory, value: float | None, origin: Origin = Origin.ROLLOUT) -> None:
    """Add the steps of a rollout below the node that it started from, each visited once, by this rollout."""
    for depth in range(node.depth + 1, len(rollout.steps) + 1):
        ended = depth == len(rollout.steps)
        prefix = rollout if ended else Trajectory(rollout.question, rollout.steps[:depth])
        node = tree.add(node, prefix, origin)
        node.visits = 1
        node.back_up(value)
