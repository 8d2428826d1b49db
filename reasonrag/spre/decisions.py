"""One state, one value: nodes of a tree that do the same in the same state are one decision, with a confidence.

A search often samples a step again, in other words too. Each copy has rollouts of its own, so copies that
were valued apart would be preferred to each other, and to their siblings, by chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import Literal

from reasonrag.core.text import normalize_answer
from reasonrag.spre.estimate import Weighting, means_below, outcome_of
from reasonrag.storage.parquet import Row

PairReward = Literal["spre", "judge", "prm"]
Content = tuple[str, str]

CONFIRMATION = "confirmation"  # origin of the nodes of a fresh rollout
# Fitted to 60 fresh rollouts a side of 2,129 pairs of 500 questions of HotpotQA, 2WikiMultiHopQA and MuSiQue.
_OF_SEARCH = 0.6  # weight of a trajectory that the search chose to go on with; that of a fresh rollout is 1
_ALIKE = 0.05  # share of the variance of rewards in a state that lies between decisions: siblings are much alike
_VARIANCE, _WEIGHT = 0.02, 3.0  # of the rewards of a decision before any is known, and how much that counts


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done in a state, and the rewards that it led to.

    Attributes:
        content: type of the action, and its text; see `content_of`.
        state: the oldest node that was written after the same prompt.
        nodes: ids of the nodes that took the step, oldest first.
        reward: mean over all complete trajectories of the search below any of them; None if it is unknown.
        ends: `[K]` reward of each of these trajectories.
        correctness: mean outcome over them, without the shortest-path term.
        known: whether it is an answer, which has an outcome.
        fresh: `[F]` rewards of rollouts that were made later, to confirm it.
        drawn: whether `ends` are answers drawn in the state, not trajectories that the search chose to go on with.
        noise: standard error of the reward of an answer, as verdicts on it differ; 0 if it is known.
    """

    content: Content
    state: int
    nodes: tuple[int, ...]
    reward: float | None
    ends: tuple[float, ...]
    correctness: float | None = None
    known: bool = False
    fresh: tuple[float, ...] = ()
    drawn: bool = False
    noise: float = 0.0

    @property
    def searched(self) -> Decision:
        """The decision as the search left it, before it was confirmed."""
        return replace(self, fresh=())

    @property
    def trust(self) -> float:
        """Weight of each of `ends`; that of a fresh rollout is 1."""
        return 1.0 if self.drawn else _OF_SEARCH

    @property
    def weight(self) -> float:
        """Number of fresh rollouts that tell as much as all of its trajectories."""
        return math.inf if self.known else self.trust * len(self.ends) + len(self.fresh)

    @property
    def estimate(self) -> float:
        """The reward, with the fresh rollouts.

        Raises:
            ValueError: nothing is known of it.
        """
        if self.reward is None:
            raise ValueError("a decision without a complete trajectory has no reward, and no error of it")
        if not self.fresh:
            return self.reward
        return (self.reward * self.trust * len(self.ends) + sum(self.fresh)) / self.weight


def decisions_of(
    tree: Sequence[Row],
    *,
    alpha: float,
    reward: PairReward = "spre",
    weighting: Weighting = "trajectories",
    same: Callable[[Row], Hashable] | None = None,
) -> list[Decision | None]:
    """Return the decision of every node of a tree; nodes of one decision share it, wherever they stand.

    Every complete trajectory counts once, also if it passes through several nodes of a decision.

    Args:
        tree: rows of `tables.tree_schema` of one question, by id.
        alpha: decay per action of SPRE, in (0, 1].
        reward: "spre" is computed from the answers; the others pool the search's values Q, each weighted
            by the visits that had a value.
        weighting: "visits" weighs the nodes of a decision, as the children of a node, by their visits.
        same: what two nodes of a decision have in common (default: `effect_of`).

    Returns:
        `[N]` decisions by node id; None for the root, for a step that was cut off
        before anything was written, and for the nodes of a fresh rollout.
    """
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in tree]
    scores = [_score(row, alpha) for row in tree]
    # What was added to confirm a decision is no part of the search that is to be confirmed.
    searched, confirming, outcomes = list(scores), list(scores), [outcome_of(row) for row in tree]
    for node, row in enumerate(tree):
        if row["origin"] == CONFIRMATION:
            searched[node] = outcomes[node] = None
        else:
            confirming[node] = None
    visits = [row["visits"] for row in tree]
    ends, fresh = _ends_below(parents, searched), _ends_below(parents, confirming)
    if reward != "spre":
        values, weights = [row["value"] for row in tree], [row["valued"] for row in tree]
    elif weighting == "visits":
        values, weights = means_below(parents, searched, visits), visits
    else:
        values, weights = means_below(parents, searched), list(map(len, ends))
    correctness = means_below(parents, outcomes)

    def pooled(nodes: Sequence[int], means: Sequence[float | None]) -> float | None:
        known = [node for node in nodes if means[node] is not None and weights[node]]
        return fmean([means[node] or 0.0 for node in known], [weights[node] for node in known]) if known else None

    decided: list[Decision | None] = [None] * len(tree)
    for state, by_content in _states(tree, same or effect_of).items():
        for nodes in by_content.values():
            outermost = _without_descendants(nodes, parents)
            decision = Decision(
                content_of(tree[nodes[0]]),
                state,
                tuple(nodes),
                pooled(outermost, values),
                tuple(end for node in outermost for end in ends[node]),
                pooled(outermost, correctness),
                known=scores[nodes[0]] is not None,
                fresh=tuple(end for node in outermost for end in fresh[node]),
                noise=max(_noise(tree[node], alpha) for node in nodes),
            )
            for node in nodes:
                decided[node] = decision
    return decided


def stopping(tree: Sequence[Row], answers: Sequence[Decision], *, alpha: float) -> Decision:
    """Return what it is worth to answer in a state: the mean over all answers that were drawn in it.

    The outcome of one answer is known, but not to the policy that is about to write it. So one good
    answer does not show that it was time to answer.

    Args:
        tree: rows of `tables.tree_schema` of one question, by id.
        answers: those of the state, one or more.
        alpha: decay per action of SPRE, in (0, 1].
    """
    drawn = [tree[node] for answer in answers for node in answer.nodes]
    parents = {row["parent_id"] for row in drawn}
    later = [row for row in tree if row["origin"] == CONFIRMATION and row["parent_id"] in parents]
    fresh, ends = (tuple(score for row in rows if (score := _score(row, alpha)) is not None) for rows in (later, drawn))
    nodes = tuple(row["node_id"] for row in drawn)
    outcome = fmean(worth for row in drawn if (worth := outcome_of(row)) is not None)
    return Decision(answers[0].content, answers[0].state, nodes, fmean(ends), ends, outcome, fresh=fresh, drawn=True)


def _score(row: Row, alpha: float) -> float | None:
    """Return SPRE of the one complete trajectory that ends in a node: its depth is its number of actions (eq. 1)."""
    outcome = outcome_of(row)
    return None if outcome is None else outcome * alpha ** row["depth"]


def _noise(row: Row, alpha: float) -> float:
    """Return the standard error of that score if it rests on several verdicts; 0 if it is known."""
    grade = row.get("grade")
    return 0.0 if grade is None else float(grade["error"] * alpha ** row["depth"])


def content_of(node: Row) -> Content:
    """Return the content of a step: its type, and the text inside the tag, normalised.

    The text is the whole step if it could not be parsed, or if nothing is left after normalising. A query
    and an answer of the same text differ.
    """
    inside = "" if node["action"] == "malformed" else normalize_answer(node["content"])
    return node["action"], inside or node["text"].strip()


def effect_of(node: Row) -> Hashable:
    """Return what a step does: a query finds passages, and any other step says words, in whatever order."""
    action, text = content_of(node)
    if action == "query" and node["passages"]:
        return action, *sorted(passage["id"] for passage in node["passages"])
    return action, *(sorted(text.split()) if action != "malformed" else [text])


def full_prompt(node: Row) -> list[Row]:
    """Return the prompt of a step; a turn that was already open is its last message, which TRL continues too."""
    open_turn = [{"role": "assistant", "content": node["prefix"]}] if node.get("prefix") else []
    return [*node["prompt"], *open_turn]


def step_end(node: Row) -> str:
    """Return what ended a step. Only a turn that the policy itself ended has an end-of-turn token to score."""
    if node["text"].endswith(tuple(node["stop"])):
        return "stop"
    return "turn" if node["finish_reason"] == "stop" else "length"


def _states(tree: Sequence[Row], same: Callable[[Row], Hashable]) -> dict[int, dict[Hashable, list[int]]]:
    """Return the ids of nodes by the state in which a step was taken, and by what they have in common there.

    A state is a prompt; its number is the oldest node after it.
    """
    first: dict[Hashable, int] = {}  # by prompt
    states: dict[int, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    done: dict[Hashable, Hashable] = {}  # by state and content: a query may find other passages the second time
    for row in tree:
        if row["parent_id"] < 0 or row["origin"] in (CONFIRMATION, "completion"):
            continue  # steps that only confirm or, by a completer, value those above them
        if row["text"] or step_end(row) != "length":  # else it was cut off before anything was written
            prompt = tuple((message["role"], message["content"]) for message in full_prompt(row))
            state = first.setdefault(prompt, row["node_id"])
            states[state][done.setdefault((state, content_of(row)), same(row))].append(row["node_id"])
    return states


def _ends_below(parents: Sequence[int | None], scores: Sequence[float | None]) -> list[list[float]]:
    """Return the scores of the ends at or below each node."""
    ends: list[list[float]] = [[] if score is None else [score] for score in scores]
    for node in reversed(range(len(parents))):  # children come after their parents
        if (parent := parents[node]) is not None:
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


def confidence(better: Decision, worse: Decision) -> float:
    """Return the probability that the first of two decisions has the higher reward, in [0, 1].

    A normal model with partial pooling (Gelman & Hill 2007, Data Analysis Using
    Regression and Multilevel Models, sec. 12.2): what decisions of one state
    are worth differs by a small part of the variance of single trajectories, so
    a difference that rests on a few of these is mostly chance. A trajectory of
    the search counts less than a fresh rollout, as the search went on where it
    looked good. The outcome of an answer is known, or as sure as the verdicts
    on it agree. How often such a probability is right on real questions stands
    in docs/results/preferences.md.

    Raises:
        ValueError: a decision has no complete trajectory.

    >>> from dataclasses import replace
    >>> one = Decision(("query", "a"), 1, (1,), 0.81, ends=(0.81,))
    >>> other = Decision(("query", "b"), 1, (2,), 0.0, ends=(0.0,))
    >>> sure = [replace(side, fresh=side.ends * 8) for side in (one, other)]
    >>> round(confidence(one, other), 2), round(confidence(*sure), 2)
    (0.74, 1.0)
    """
    gap = better.estimate - worse.estimate
    noise = better.noise**2 + worse.noise**2
    if better.known and worse.known:
        return NormalDist().cdf(gap / math.sqrt(noise)) if noise else float(gap > 0)
    variance = _variance(better, worse)
    error = variance / better.weight + variance / worse.weight + noise  # of the gap
    prior = 2 * variance * _ALIKE / (1 - _ALIKE)
    return NormalDist().cdf(gap * math.sqrt(prior / (error * (error + prior))))


def standard_error(decision: Decision) -> float:
    """Return the standard error of the estimate of a decision, 0 for an answer.

    Raises:
        ValueError: the decision has no complete trajectory.
    """
    known = decision.estimate is not None
    return math.sqrt(_variance(decision) / decision.weight + decision.noise**2) if known else 0.0


def _variance(*sides: Decision) -> float:
    """Return the variance of the rewards of single trajectories, the prior included."""
    squares, weight = _WEIGHT * _VARIANCE, _WEIGHT
    for side in sides:
        if not side.known:
            weight += side.weight
            squares += side.trust * sum((end - side.estimate) ** 2 for end in side.ends)
            squares += sum((end - side.estimate) ** 2 for end in side.fresh)
    return squares / weight
