"""The outcome reward: the final answer, and optionally the form (Search-R1, arXiv:2503.09516, v0.1 and v0.3).

With `search_confidence` it is the reward of beta-GRPO (arXiv:2505.17281): a right answer after a search of which the
policy was not sure counts as wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Completion, Search, Trajectory
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


def search_confidence(trajectory: Trajectory, opening: str, decode: Callable[[Sequence[int]], str]) -> float | None:
    """Return the lowest probability that the policy gave to a token of its searches, in [0, 1]; None without a search.

    A search is what was sampled from the token that begins its `opening` tag to the end of its completion, both tags
    included.

    Raises:
        ConfigError: a search has no log-probabilities.
    """
    searches = [step.completion for step in trajectory.steps if isinstance(step.action, Search)]
    lowest = [min(_search_logprobs(completion, opening, decode)) for completion in searches]
    return math.exp(min(lowest)) if lowest else None


def _search_logprobs(completion: Completion, opening: str, decode: Callable[[Sequence[int]], str]) -> Sequence[float]:
    ids, logprobs = completion.token_ids, completion.logprobs
    if not ids or logprobs is None or len(logprobs) != len(ids):
        raise ConfigError(
            "reward.outcome.search_confidence needs the log-probability of each sampled token, and the policy's engine "
            "reports none; set it to 0, or rollout.top_p to 1, or leave rollout.url out"
        )
    # The longer the tail, the more it holds: the shortest tail with the tag begins where the tag does.
    behind = bisect_left(range(len(ids)), True, key=lambda start: opening not in decode(ids[start:]))
    return logprobs[max(behind - 1, 0) :]


class OutcomeReward(BatchReward):
    """Scores by `outcome_reward`. Parts: `answer`, `format`, `answered`, and the common ones.

    With a `search_confidence` also `confidence`, that of the trajectory.
    """

    def __init__(self, settings: OutcomeSettings, parts: RewardParts) -> None:
        """Check and store the parts.

        Raises:
            ConfigError: confidence counts, and the format has no tag around queries, or log-probabilities are unknown.
        """
        super().__init__(parts)
        self.settings = settings
        form: Any = parts.format
        mark = getattr(form, "query_mark", None)  # formats of one growing turn have one
        self._opening = None if mark is None else mark or f"<{form.search}>"
        self._decode = parts.decode
        if settings.search_confidence and self._opening is None:
            raise ConfigError(
                f"reward.outcome.search_confidence reads a search tag, and format {parts.format.name!r} has none; set "
                "it to 0, or choose a format of one growing turn"
            )
        if settings.search_confidence and parts.decode is None:
            raise ConfigError(
                "reward.outcome.search_confidence needs the log-probabilities of the policy's tokens, and only "
                "`rl train` knows them; set it to 0"
            )

    async def _value(self, read: Read, step: int) -> float:
        answer = read.parts[self.settings.metric] or 0.0
        if self.settings.search_confidence:
            assert self._opening is not None and self._decode is not None
            sure = search_confidence(read.trajectory, self._opening, self._decode)
            read.parts["confidence"] = sure
            answer *= sure is None or sure >= self.settings.search_confidence
        answered = read.trajectory.answer is not None
        read.parts.update(answer=answer, format=float(read.reading.well_formed), answered=float(answered))
        return outcome_reward(
            answer,
            read.reading.well_formed,
            answered,
            format_weight=self.settings.format_weight,
            answer_present=self.settings.answer_present,
        )
