"""Which child the search follows: PUCT as the paper prints it, UCB1 as its published builder computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from reasonrag.mcts.tree import Node


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
