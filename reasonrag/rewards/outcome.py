"""Rewards of the final answer: alone, with the form (Search-R1), by the shortest path (SPRE), or with a PRM's values.

With `search_confidence` the outcome reward is that of beta-GRPO (arXiv:2505.17281): a right answer after
a search of which the policy was not sure counts as wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Search, Trajectory
from reasonrag.formats.base import Format
from reasonrag.rewards.base import BatchReward, Read, RewardSettings, Score


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

    Search-R1 v0.3 (0.2 and 0.1): right and well-formed,
    right only, well-formed only, an answer only, nothing.

    >>> weights = {"format_weight": 0.2, "answer_present": 0.1}
    >>> [outcome_reward(1.0, True, True, **weights), outcome_reward(1.0, False, True, **weights)]
    [1.0, 0.8]
    >>> [outcome_reward(0.0, well_formed, True, **weights) for well_formed in (True, False)]
    [0.2, 0.1]
    >>> outcome_reward(0.0, False, False, **weights)
    0.0
    """
    value = answer * (1 - format_weight) + format_weight * well_formed
    return max(value, answer_present) if answered else value


def search_confidence(trajectory: Trajectory, opening: str, decode: Callable[[Sequence[int]], str]) -> float | None:
    """Return the lowest probability that the policy gave to a token of its searches, in [0, 1]; None without a search.

    A search reaches from the token that begins its `opening`
    tag to the end of its completion, both tags included.

    Raises:
        ConfigError: a search has no log-probabilities.
    """
    lowest: list[float] = []
    for completion in (step.completion for step in trajectory.steps if isinstance(step.action, Search)):
        ids, logprobs = completion.token_ids, completion.logprobs
        if not ids or logprobs is None or len(logprobs) != len(ids):
            raise ConfigError(
                "reward.outcome.search_confidence needs the log-probability of each sampled token, and the policy's "
                "engine reports none; set it to 0, or rollout.top_p to 1, or leave rollout.url out"
            )
        # The longer the tail, the more it holds: the shortest tail with the tag begins where the tag does.
        after_tag = bisect_left(range(len(ids)), True, key=lambda start: opening not in decode(ids[start:]))
        lowest.append(min(logprobs[max(after_tag - 1, 0) :]))
    return math.exp(min(lowest)) if lowest else None


class OutcomeReward(BatchReward):
    """Search-R1's reward (arXiv:2503.09516, v0.1 and v0.3): see `outcome_reward`.

    Parts: `answer`, `format`, `answered`, and the common
    ones; with a `search_confidence` also `confidence`.
    """

    @staticmethod
    def needs(settings: RewardSettings, format: Format) -> frozenset[str]:
        if not settings.outcome.search_confidence:
            return frozenset()
        if not getattr(format, "query_mark", None):
            raise ConfigError(
                f"reward.outcome.search_confidence reads a search tag, and format {format.name!r} has none; set it to "
                "0, or choose a format of one growing turn"
            )
        return frozenset({"decode"})

    async def _value(self, read: Read, step: int) -> float:
        settings, parts = self.settings.outcome, read.parts
        answer = read.answer("em")
        if settings.search_confidence:
            opening: str = self.parts.format.query_mark  # the tag that opens a search
            confidence = parts["confidence"] = search_confidence(read.trajectory, opening, self.parts.decode)
            if confidence is not None and confidence < settings.search_confidence:
                answer = 0.0  # the form keeps what it earns
        answered, well_formed = read.trajectory.answer is not None, read.reading.well_formed
        parts.update(answer=answer, format=float(well_formed), answered=float(answered))
        weights = {"format_weight": settings.format_weight, "answer_present": settings.answer_present}
        return outcome_reward(answer, well_formed, answered, **weights)


class SPREReward(BatchReward):
    """`F1 * alpha**steps`, in [0, 1] (arXiv:2505.14069, eq. 1 with k = 1): each step costs a share of the answer's F1.

    A trajectory is its only rollout. One that ended without an answer earns
    0, as its F1 is 0: it is complete, unlike the unfinished branch of a tree,
    which has no value. Parts: `path` (`alpha**steps`), and the common ones.
    """

    needs: frozenset[str] = frozenset()

    async def _value(self, read: Read, step: int) -> float:
        # No answer has F1 0, so such a trajectory earns 0.
        path = read.parts["path"] = self.settings.spre.alpha ** len(read.trajectory.steps)
        return read.answer("f1") * path


class PRMReward(BatchReward):
    """The answer, and for each step what it adds to a process reward model's value (ProRAG, arXiv:2601.21912).

    Only the increase counts, times `weight`: a step that leads nowhere earns
    nothing, and more steps do not earn more (arXiv:2410.08146). A step without text
    has no reward. Parts: `process`, the value of the last step, and the common ones.
    """

    needs: frozenset[str] = frozenset({"scorer"})

    async def _value(self, read: Read, step: int) -> Score:
        steps = read.trajectory.steps
        values = await self.parts.scorer.score([(one.prompt, one.completion) for one in steps if one.completion.text])
        read.parts["process"] = values[-1] if values else None
        # V_0 = 0, so the increases sum to the value of the last step.
        increases = (self.settings.prm.weight * (value - before) for before, value in pairwise([0.0, *values]))
        rewards = tuple(next(increases) if one.completion.text else None for one in steps)
        return Score(read.answer("f1"), read.parts, steps=rewards)
