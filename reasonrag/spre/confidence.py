"""How sure the reward of a decision is, and the order of two: a Bayesian bootstrap over complete trajectories."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from reasonrag.spre.decisions import Decision

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Draws = npt.NDArray[np.float64]

_DRAWS = 4000  # a probability is off by 0.008 at most, as a standard error


def confidence(better: Decision, worse: Decision) -> float:
    """Return the probability that the first of two decisions has the higher reward, in [0, 1].

    Each complete trajectory below a decision gets a random weight from a flat Dirichlet distribution, which makes a
    posterior of its mean reward (the Bayesian bootstrap; Rubin 1981, Annals of Statistics 9(1), 130-134). A bootstrap
    of few trajectories is too sure: of one it is certain. So two pseudo-trajectories of half a weight each are added,
    with the lowest and the highest reward that is still possible. Where all rewards are one of these two, this is
    Jeffreys' prior of a share, Beta(1/2, 1/2). The prior pulls a few trajectories towards the middle, so the result can
    be below one half. An answer has a known F1: nothing is added or drawn for it. Every trajectory counts once, also
    where `value.weighting` is visits. The draws have fixed seeds: the result depends on the two decisions alone.

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
def _posterior(ends: tuple[float, ...], ceiling: float | None, side: int) -> Draws:
    """Return `[_DRAWS]` mean rewards, or `[1]` if it is known; the two sides of a pair are drawn independently."""
    import numpy as np

    if not ends:
        raise ValueError("a decision without a complete trajectory has no reward, and none that could be compared")
    if ceiling is None:
        return np.array([math.fsum(ends) / len(ends)])
    rewards = np.array([0.0, ceiling, *sorted(ends)])
    weights = _gammas(side, 1 << len(ends).bit_length())[: len(rewards)]
    return np.asarray(rewards @ weights / weights.sum(0))


@lru_cache(maxsize=64)
def _gammas(side: int, trajectories: int) -> Draws:
    """Return `[2 + trajectories, _DRAWS]` gamma variates, whose shares of their sum are Dirichlet weights.

    Rows are drawn one after another, so a larger table begins with the smaller one.
    """
    import numpy as np

    random = np.random.default_rng(side)
    prior = random.standard_gamma(0.5, (2, _DRAWS))
    return np.concatenate([prior, random.standard_exponential((trajectories, _DRAWS))])
