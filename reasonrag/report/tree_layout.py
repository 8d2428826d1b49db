"""Where the nodes of a tree are drawn: a column a step, a row a leaf, parents centred on their children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Of a node: `column` is its depth; two nodes of one column are at least 1 apart in `row`."""

    column: int
    row: float


def layout(parents: Sequence[int | None]) -> list[Place]:
    """Leaves in depth-first order get the rows 0, 1, 2, ...; a parent stands midway between its outer children.

    The subtrees of siblings fill row intervals that do not meet, and a parent stays within its own: nothing overlaps.

    Args:
        parents: `[N]` the parent of each node, which comes before it; None at the root, which is the first.

    >>> [(place.column, place.row) for place in layout([None, 0, 0, 1, 1])]
    [(0, 1.25), (1, 0.5), (1, 2.0), (2, 0.0), (2, 1.0)]
    """
    children = children_of(parents)
    columns = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent is not None:
            columns[node] = columns[parent] + 1
    rows = [0.0] * len(parents)
    leaves = (node for node in depth_first(children) if not children[node])
    for row, leaf in enumerate(leaves):
        rows[leaf] = float(row)
    for node in reversed(range(len(parents))):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return [Place(column, row) for column, row in zip(columns, rows, strict=True)]


def children_of(parents: Sequence[int | None]) -> list[list[int]]:
    """`[N]` the children of each node, oldest first."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(node)
    return children


def depth_first(children: Sequence[Sequence[int]]) -> list[int]:
    """Nodes in the order in which a reader meets them, from the root; trees of any depth."""
    order: list[int] = []
    waiting = [0] if children else []
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(reversed(children[node]))
    return order
