"""The outcome reward: the final answer, and optionally the form (Search-R1, arXiv:2503.09516, v0.1 and v0.3)."""

from __future__ import annotations

from reasonrag.rewards.base import RewardParts
from reasonrag.rewards.batch import BatchReward, Read
from reasonrag.rewards.settings import OutcomeSettings


def outcome_reward(
    answer: float, well_formed: bool, answered: bool, *, format_weight: float, answer_present: float
) -> float:
    """Return `A * (1 - lf) + lf * F`, and at least `answer_present` if there is an answer; in [0, 1].

    Args:
        answer: A, the metric of the final answer in [0, 1].
        well_formed: F, whether the trajectory is well-formed.
        answered: whether it has a final answer.
        format_weight: lf in [0, 1].
        answer_present: at most `format_weight`.

    Search-R1 v0.3 (0.2 and 0.1): right and well-formed, right only, well-formed only, an answer only, nothing.

    >>> weights = {"format_weight": 0.2, "answer_present": 0.1}
    >>> [outcome_reward(1.0, True, True, **weights), outcome_reward(1.0, False, True, **weights)]
    [1.0, 0.8]
    >>> [outcome_reward(0.0, form, said, **weights) for form, said in ((True, True), (False, True), (False, False))]
    [0.2, 0.1, 0.0]
    """
    value = answer * (1 - format_weight) + format_weight * well_formed
    return max(value, answer_present) if answered else value


class OutcomeReward(BatchReward):
    """Scores by `outcome_reward`. Parts: `answer`, `format`, `answered`, and the common ones."""

    def __init__(self, settings: OutcomeSettings, parts: RewardParts) -> None:
        super().__init__(parts)
        self.settings = settings

    async def _value(self, read: Read, step: int) -> float:
        answer = read.parts[self.settings.metric] or 0.0
        answered = read.trajectory.answer is not None
        read.parts.update(answer=answer, format=float(read.reading.well_formed), answered=float(answered))
        return outcome_reward(
            answer,
            read.reading.well_formed,
            answered,
            format_weight=self.settings.format_weight,
            answer_present=self.settings.answer_present,
        )
