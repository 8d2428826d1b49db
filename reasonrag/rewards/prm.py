"""A process reward model's values as a dense reward, beside the outcome (ProRAG, arXiv:2601.21912)."""

from __future__ import annotations

from itertools import pairwise

from reasonrag.core.errors import ConfigError
from reasonrag.rewards.base import RewardParts, Score
from reasonrag.rewards.batch import BatchReward, Read
from reasonrag.rewards.settings import PRMRewardSettings


class PRMReward(BatchReward):
    """Scores a trajectory by its answer, and each of its steps by what it adds to the model's value, times `weight`.

    So a step that leads nowhere earns nothing, and more steps do not earn more (arXiv:2410.08146). A step without text
    has no reward. Parts: `process`, the value of the last step, and the common ones.
    """

    def __init__(self, settings: PRMRewardSettings, parts: RewardParts) -> None:
        if parts.scorer is None:
            raise ConfigError("reward prm asks a process reward model, and none is named; add --prm")
        super().__init__(parts)
        self.settings = settings
        self.scorer = parts.scorer

    async def _value(self, read: Read, step: int) -> Score:
        taken = read.trajectory.steps
        written = [(one.prompt, one.completion) for one in taken if one.completion.text]
        values = await self.scorer.score(written)
        read.parts["process"] = values[-1] if values else None
        added = (self.settings.weight * (value - before) for before, value in pairwise([0.0, *values]))
        steps = tuple(next(added) if one.completion.text else None for one in taken)
        return Score(read.parts[self.settings.metric], read.parts, steps=steps)
