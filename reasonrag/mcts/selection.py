"""Which child to follow: PUCT as the paper prints it, and UCB1 as its published builder computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from reasonrag.mcts.tree import Node

Selection = Literal["puct", "ucb1"]


def puct(value: float, visits: int, sibling_visits: int, parent_visits: int, c_uct: float) -> float:
    """`Q + c * sqrt(sum of N over the siblings, itself included) / (1 + N)` (arXiv:2505.14069, eq. 5).

    >>> puct(0.5, 1, 4, 4, c_uct=1.0)
    1.5
    """
    return value + c_uct * math.sqrt(sibling_visits) / (1 + visits)


def ucb1(value: float, visits: int, sibling_visits: int, parent_visits: int, c_uct: float) -> float:
    """`Q + c * sqrt(ln N_parent / N)`; an unvisited child comes first (Kocsis & Szepesvari 2006, the paper's [74]).

    >>> ucb1(0.5, 1, 1, 1, c_uct=1.0)
    0.5
    """
    return value + c_uct * math.sqrt(math.log(max(parent_visits, 1)) / visits) if visits else math.inf


SELECTIONS: dict[Selection, Callable[[float, int, int, int, float], float]] = {"puct": puct, "ucb1": ucb1}


def select_child(parent: Node, children: Sequence[Node], *, selection: Selection, c_uct: float) -> Node:
    """The child with the highest score; the oldest one of equals.

    A child without a value (a judge that could not be read, no answer) is taken to be worth what its parent is, so
    that a failure neither draws the search nor repels it.
    """
    score = SELECTIONS[selection]
    unknown = parent.value if parent.value is not None else 0.0
    total = sum(child.visits for child in children)
    return max(
        children,
        key=lambda c: score(c.value if c.value is not None else unknown, c.visits, total, parent.visits, c_uct),
    )
