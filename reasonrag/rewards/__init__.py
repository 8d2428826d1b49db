"""Rewards: trajectory to score."""

from __future__ import annotations

from collections.abc import Callable

from reasonrag.core.errors import ConfigError
from reasonrag.core.plugins import import_plugin, make_plugin
from reasonrag.core.settings import nearest
from reasonrag.rewards.base import Encoder, Reward, RewardParts, Score
from reasonrag.rewards.functions import FunctionReward
from reasonrag.rewards.hiprag import HiPRAGReward
from reasonrag.rewards.outcome import OutcomeReward
from reasonrag.rewards.prm import PRMReward
from reasonrag.rewards.reasonrag import SPREReward
from reasonrag.rewards.search_p1 import SearchP1Reward
from reasonrag.rewards.settings import RewardSettings
from reasonrag.rewards.when_to_search import WhenToSearchReward

# Each is called with the settings of all rewards, of which it takes its own, and the parts that it may use.
REWARDS: dict[str, Callable[[RewardSettings, RewardParts], Reward]] = {
    "outcome": lambda settings, parts: OutcomeReward(settings.outcome, parts),
    "spre": lambda settings, parts: SPREReward(settings.spre, parts),
    "prm": lambda settings, parts: PRMReward(settings.prm, parts),
    "hiprag": lambda settings, parts: HiPRAGReward(settings.hiprag, parts),
    "search-p1": lambda settings, parts: SearchP1Reward(settings.search_p1, parts),
    "when-to-search": lambda settings, parts: WhenToSearchReward(settings.when_to_search, parts),
}

__all__ = ["REWARDS", "Encoder", "Reward", "RewardParts", "RewardSettings", "Score", "open_reward"]


def open_reward(settings: RewardSettings, parts: RewardParts) -> Reward:
    """Open the named reward: one of `REWARDS`, or your own class or function as `python:PACKAGE.MODULE:NAME`.

    Raises:
        ConfigError: there is no reward of that name, it needs a part that is missing, or a function has no known form.
    """
    if ":" in settings.name:
        plugin = import_plugin(settings.name)
        if not isinstance(plugin, type):
            return FunctionReward(plugin, settings.name.removeprefix("python:"), parts)
        reward: Reward = make_plugin(settings.name, ("score",), settings, parts)
        return reward
    if settings.name not in REWARDS:
        raise ConfigError(
            f"reward {settings.name!r} is unknown{nearest(settings.name, REWARDS)}, python:PACKAGE.MODULE:NAME"
        )
    return REWARDS[settings.name](settings, parts)
