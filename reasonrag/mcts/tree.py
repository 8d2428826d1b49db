"""A search tree: many trajectories that share prefixes (arXiv:2505.14069, App. A)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from reasonrag.core.types import Question, Step, Trajectory


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
        """Return the node's children, oldest first."""
        return [self.nodes[child] for child in node.children]

    def path_up(self, node: Node) -> Iterator[Node]:
        """Yield the node, its parent, ... and the root."""
        while True:
            yield node
            if node.parent is None:
                return
            node = self.nodes[node.parent]
