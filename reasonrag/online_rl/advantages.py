"""Advantages of trajectories (arXiv:2402.03300, sec. 4.1; "Learning when to search", eq. 5), and of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

Baseline = Literal["group", "others"]
Scale = Literal["group", "none"]
_EPSILON = 1e-4  # added to a deviation that divides, as TRL adds it


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "group", scale: Scale = "group", epsilon: float = _EPSILON
) -> list[float]:
    """Return the `[G]` advantages of one group.

    Args:
        rewards: `[G]`; a member without a reward is left out of the baseline and gets advantage 0.
        baseline: the mean of the group, or the mean of the other members (RLOO, arXiv:2402.14740, sec. 2.3).
        scale: divide by the sample standard deviation of the same rewards, or not at all (Dr. GRPO).
        epsilon: added to the deviation; a group without variance is not divided, and its advantages are 0.

    >>> [round(a, 3) for a in group_advantages([1.0, 0.0, None, 0.5])]
    [1.0, -1.0, 0.0, 0.0]
    >>> group_advantages([1.0, 0.0, 0.0], baseline="others", scale="none")
    [1.0, -0.5, -0.5]
    """
    known = [reward for reward in rewards if reward is not None]
    advantages = []
    for reward in rewards:
        if reward is None or len(known) < 2:
            advantages.append(0.0)
            continue
        compared = list(known)
        if baseline == "others":
            compared.remove(reward)
        deviation = stdev(compared) if scale == "group" and len(compared) > 1 else 0.0
        advantages.append((reward - fmean(compared)) / (deviation + epsilon if deviation else 1.0))
    return advantages


def advantage_scale(scale: Literal["group", "batch", "none"], rewards: Sequence[float | None]) -> tuple[Scale, float]:
    """Return `scale` of `group_advantages`, and a divisor of its result, for one of TRL's `scale_rewards`.

    Args:
        scale: divide by the deviation of the group, by that of the whole batch, or not at all.
        rewards: the rewards of the whole batch.

    >>> scale, divisor = advantage_scale("batch", [1.0, 3.0, None])
    >>> scale, round(divisor, 4)
    ('none', 1.4143)
    """
    if scale != "batch":
        return scale, 1.0
    known = [reward for reward in rewards if reward is not None]
    return "none", (stdev(known) if len(known) > 1 else 0.0) + _EPSILON


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, lam: float = 1.0) -> list[float]:
    """Return the `[T]` advantages of a trajectory's tokens (arXiv:1506.02438, eq. 16); with `values` they are returns.

    What others wrote between the tokens is no step in time: verl leaves such tokens out likewise.

    Args:
        rewards: `[T]`, by token that the policy wrote.
        values: `[T]` what was expected before each token; zeros give the plain returns (REINFORCE).
        gamma: discount, in (0, 1].
        lam: in [0, 1]; with 1, an advantage is the return less the value.

    >>> gae([0.0, 1.0], [0.5, 0.25], lam=0.5)
    [0.125, 0.75]
    """
    advantages: list[float] = []
    following = later = 0.0  # the value of the next token, and its advantage
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * following - value + gamma * lam * later
        following = value
        advantages.append(later)
    return advantages[::-1]


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Return whether any two members differ: a group of equal rewards has no learning signal.

    >>> has_variance([1.0, None, 1.0]), has_variance([1.0, 0.5])
    (False, True)
    """
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) - min(known) > 1e-6
