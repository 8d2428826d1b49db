"""One state, one value: nodes of a tree that take the same step in the same state are one decision, with a confidence.

A search often samples a step again. Each copy has rollouts of its own, so copies that were valued apart
would be preferred to each other, and to their siblings, by chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

from reasonrag.core.text import normalize_answer
from reasonrag.spre.estimate import Weighting, means_below
from reasonrag.storage.parquet import Row

PairReward = Literal["spre", "judge", "prm"]
Content = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Decision:
    """A step in a state, and the rewards that it led to.

    Attributes:
        content: type of the action, and its text; see `content_of`.
        nodes: ids of the nodes that took the step, oldest first.
        reward: mean over all complete trajectories below any of them; None if it is unknown.
        ends: `[K]` reward of each of these trajectories.
        ceiling: highest reward that a trajectory through it can have, which answers right at the next
            step; None if the step is an answer itself: its F1 is known.
    """

    content: Content
    nodes: tuple[int, ...]
    reward: float | None
    ends: tuple[float, ...]
    ceiling: float | None


def decisions_of(
    tree: Sequence[Row], *, alpha: float, reward: PairReward = "spre", weighting: Weighting = "trajectories"
) -> list[Decision | None]:
    """Return the decision of every node of a tree; nodes of one decision share it, wherever they stand.

    Every complete trajectory counts once, also if it passes through several nodes of a decision.

    Args:
        tree: rows of `tables.tree_schema` of one question, by id.
        alpha: decay per action of SPRE, in (0, 1].
        reward: "spre" is computed from the answers; the others pool the search's values Q, each weighted
            by the visits that had a value.
        weighting: "visits" weighs the nodes of a decision, as the children of a node, by their visits.

    Returns:
        `[N]` decisions by node id; None for the root, and for
        a step that was cut off before anything was written.
    """
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in tree]
    # SPRE of one complete trajectory is F1 * alpha**depth: its depth is its number of actions (eq. 1).
    scores = [None if row["f1"] is None else row["f1"] * alpha ** row["depth"] for row in tree]
    visits = [row["visits"] for row in tree]
    ends = _ends_below(parents, scores)
    if reward != "spre":
        values, weights = [row["value"] for row in tree], [row["valued"] for row in tree]
    elif weighting == "visits":
        values, weights = means_below(parents, scores, visits), visits
    else:
        values, weights = means_below(parents, scores), list(map(len, ends))

    decided: list[Decision | None] = [None] * len(tree)
    for (_, content), nodes in _same_steps(tree).items():
        outermost = _without_descendants(nodes, parents)
        known = [node for node in outermost if values[node] is not None and weights[node]]
        pooled = fmean([values[node] for node in known], [weights[node] for node in known]) if known else None
        ends_below: list[float] = []
        for node in outermost:
            ends_below += ends[node]
        # A search may be answered right at the next step. An answer is known: nothing better can follow.
        least_depth = min(tree[node]["depth"] for node in nodes)
        ceiling = None if scores[nodes[0]] is not None else alpha ** (1 + least_depth)
        decision = Decision(content, tuple(nodes), pooled, tuple(ends_below), ceiling)
        for node in nodes:
            decided[node] = decision
    return decided


def content_of(node: Row) -> Content:
    """Return the content of a step: its type, and the text inside the tag, normalised.

    The text is the whole step if it could not be parsed, or if nothing is left after normalising. A query
    and an answer of the same text differ.
    """
    inside = "" if node["action"] == "malformed" else normalize_answer(node["content"])
    return node["action"], inside or node["text"].strip()


def full_prompt(node: Row) -> list[Row]:
    """Return the prompt of a step; a turn that was already open is its last message, which TRL continues too."""
    open_turn = [{"role": "assistant", "content": node["prefix"]}] if node.get("prefix") else []
    return [*node["prompt"], *open_turn]


def step_end(node: Row) -> str:
    """Return what ended a step. Only a turn that the policy itself ended has an end-of-turn token to score."""
    if node["text"].endswith(tuple(node["stop"])):
        return "stop"
    return "turn" if node["finish_reason"] == "stop" else "length"


def _same_steps(tree: Sequence[Row]) -> dict[tuple[Hashable, Content], list[int]]:
    """Return the ids of nodes by the state in which a step was taken, which is its prompt, and by its content."""
    nodes: dict[tuple[Hashable, Content], list[int]] = defaultdict(list)
    for row in tree:
        if row["parent_id"] < 0 or (not row["text"] and step_end(row) == "length"):
            continue
        state = tuple((message["role"], message["content"]) for message in full_prompt(row))
        nodes[state, content_of(row)].append(row["node_id"])
    return nodes


def _ends_below(parents: Sequence[int | None], scores: Sequence[float | None]) -> list[list[float]]:
    """Return the scores of the ends at or below each node."""
    ends: list[list[float]] = [[] if score is None else [score] for score in scores]
    for node in reversed(range(len(parents))):  # children come after their parents
        parent = parents[node]
        if parent is not None:
            ends[parent] += ends[node]
    return ends


def _without_descendants(nodes: Sequence[int], parents: Sequence[int | None]) -> list[int]:
    """Return the nodes that are not below another one of them, so that no trajectory counts twice.

    A step that cannot be parsed leaves the state as it is, so it can be repeated below itself.
    """
    among, outermost = set(nodes), []
    for node in nodes:
        ancestor = parents[node]
        while ancestor is not None and ancestor not in among:
            ancestor = parents[ancestor]
        if ancestor is None:
            outermost.append(node)
    return outermost


_DRAWS = 4000  # a probability is off by 0.008 at most, as a standard error


def confidence(better: Decision, worse: Decision) -> float:
    """Return the probability that the first of two decisions has the higher reward, in [0, 1].

    Each complete trajectory below a decision gets a random weight from a flat Dirichlet
    distribution, which makes a posterior of its mean reward (the Bayesian bootstrap; Rubin
    1981, Annals of Statistics 9(1), 130-134). A bootstrap of few trajectories is too sure: of
    one it is certain. So two pseudo-trajectories of half a weight each are added, with the
    lowest and the highest reward that is still possible. Where all rewards are one of these
    two, this is Jeffreys' prior of a share, Beta(1/2, 1/2). The prior pulls a few trajectories
    towards the middle, so the result can be below one half. An answer has a known F1: nothing
    is added or drawn for it. Every trajectory counts once, also where `value.weighting` is
    visits. The draws have fixed seeds: the result depends on the two decisions alone.

    Raises:
        ValueError: a decision has no complete trajectory.

    >>> one = Decision(("query", "a"), (1,), 0.81, ends=(0.81,), ceiling=0.81)
    >>> other = Decision(("query", "b"), (2,), 0.0, ends=(0.0,), ceiling=0.81)
    >>> answer = Decision(("answer", "c"), (3,), 0.0, ends=(0.0,), ceiling=None)
    >>> round(confidence(one, other), 2), confidence(one, answer)
    (0.9, 1.0)
    """
    return float((_posterior(better.ends, better.ceiling, 0) > _posterior(worse.ends, worse.ceiling, 1)).mean())


def standard_error(decision: Decision) -> float:
    """Return the standard deviation of the posterior that `confidence` draws from, in closed form.

    Raises:
        ValueError: the decision has no complete trajectory.

    >>> round(standard_error(Decision(("query", "a"), (1, 5), 0.5, ends=(1.0, 0.0), ceiling=1.0)), 3)
    0.25
    """
    import numpy as np

    if not decision.ends:
        raise ValueError("a decision without a complete trajectory has no reward, and no error of it")
    if decision.ceiling is None:
        return 0.0
    weights = np.array([0.5, 0.5] + [1.0] * len(decision.ends))
    rewards = np.array([0.0, decision.ceiling, *decision.ends])
    total = weights.sum()
    mean = (rewards * weights).sum() / total  # as np.average does, in half the time
    return math.sqrt(((rewards - mean) ** 2 * weights).sum() / total / (total + 1))


@lru_cache(maxsize=2048)
def _posterior(ends: tuple[float, ...], ceiling: float | None, side: int) -> Any:
    """Return `[_DRAWS]` mean rewards, or `[1]` if it is known; the two sides of a pair are drawn independently."""
    import numpy as np

    if not ends:
        raise ValueError("a decision without a complete trajectory has no reward, and none that could be compared")
    if ceiling is None:
        return np.array([math.fsum(ends) / len(ends)])
    rewards = np.array([0.0, ceiling, *sorted(ends)])  # `[2 + K]`
    weights = _gammas(side, 1 << len(ends).bit_length())[: len(rewards)]  # `[2 + K, _DRAWS]`; few sizes are cached
    return np.asarray(rewards @ weights / weights.sum(0))


@lru_cache(maxsize=64)
def _gammas(side: int, trajectories: int) -> Any:
    """Return `[2 + trajectories, _DRAWS]` gamma variates; divided by their sum they are Dirichlet weights.

    Rows are drawn one after another, so a larger table begins with the smaller one.
    """
    import numpy as np

    generator = np.random.default_rng(side)
    prior = generator.standard_gamma(0.5, (2, _DRAWS))  # half a weight for each pseudo-trajectory
    return np.concatenate([prior, generator.standard_exponential((trajectories, _DRAWS))])
