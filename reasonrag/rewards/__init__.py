"""Rewards: trajectory to score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.plugins import import_plugin, make_plugin
from reasonrag.core.settings import nearest
from reasonrag.formats.base import Format
from reasonrag.rewards.base import MISSING, FunctionReward, Reward, RewardParts, RewardSettings, Score, trl_columns
from reasonrag.rewards.hiprag import HiPRAGReward
from reasonrag.rewards.outcome import OutcomeReward, PRMReward, SPREReward
from reasonrag.rewards.search_p1 import SearchP1Reward
from reasonrag.rewards.when_to_search import WhenToSearchReward

# Each is made with the settings of all rewards and with
# `RewardParts`; its `needs` name the parts that it uses.
REWARDS: dict[str, Callable[[RewardSettings, RewardParts], Reward]] = {
    "outcome": OutcomeReward,
    "spre": SPREReward,
    "prm": PRMReward,
    "hiprag": HiPRAGReward,
    "search-p1": SearchP1Reward,
    "when-to-search": WhenToSearchReward,
}

__all__ = ["REWARDS", "Reward", "RewardParts", "RewardSettings", "Score", "open_reward", "reward_needs"]


def reward_needs(settings: RewardSettings, format: Format) -> frozenset[str] | None:
    """Return the parts that the named reward needs, without making it; None if a user's class does not declare them.

    Raises:
        ConfigError: the reward's name is unknown, it does not
            suit the format, or a function has no known form.
    """
    name = settings.name
    if ":" not in name and name not in REWARDS:
        raise ConfigError(f"reward {name!r} is unknown{nearest(name, REWARDS)}, python:PACKAGE.MODULE:NAME")
    reward: Any = import_plugin(name) if ":" in name else REWARDS[name]
    if not isinstance(reward, type):
        trl_columns(reward, name)
        return frozenset()
    needs = getattr(reward, "needs", None)
    return needs(settings, format) if callable(needs) else needs


def open_reward(settings: RewardSettings, parts: RewardParts) -> Reward:
    """Open the named reward: one of `REWARDS`, or your own class or function as `python:PACKAGE.MODULE:NAME`.

    Raises:
        ConfigError: the reward's name is unknown, or a part that it needs is missing.
    """
    for need in sorted(reward_needs(settings, parts.format) or ()):
        if getattr(parts, need, None) is None:
            raise ConfigError(f"reward {settings.name} needs {MISSING.get(need, need)}")
    if ":" not in settings.name:
        return REWARDS[settings.name](settings, parts)
    if not isinstance(plugin := import_plugin(settings.name), type):
        return FunctionReward(plugin, settings.name.removeprefix("python:"), parts)
    reward: Reward = make_plugin(settings.name, ("score",), settings, parts)
    return reward
