"""Verdicts of a judge on attempts: whether an answer is right in meaning, needless and missing searches.

LasJ follows When-to-search, sec. 4.1; OSR and USR follow HiPRAG, eq. 2 (arXiv:2510.07794).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reasonrag.core.config import JudgeConfig
from reasonrag.core.errors import ConfigError, InputError, Interrupted
from reasonrag.core.types import Trajectory
from reasonrag.formats.base import PromptSet, Reading
from reasonrag.llm.base import LLM
from reasonrag.rewards.base import cause_of
from reasonrag.rewards.hiprag import StepFlag, detect
from reasonrag.rewards.judge import JudgeService, answer_matches, templates_fingerprint

JUDGED = ("lasj", "osr", "usr")

# Texts of the prompt set that each metric needs, and the name that its verdicts are counted under.
_TEXTS = {
    "lasj": ("judge/answer",),
    "osr": ("judge/same_meaning", "hiprag/direct"),
    "usr": ("judge/step_holds",),
}
COUNTED_AS = {"lasj": "answer", "osr": "over", "usr": "under"}


@dataclass(frozen=True, slots=True)
class Judging:
    """A judge, and the metrics of `JUDGED` that it is asked for."""

    model: JudgeConfig
    metrics: tuple[str, ...] = JUDGED

    def __post_init__(self) -> None:
        if not self.metrics or not set(self.metrics) <= set(JUDGED):
            raise ConfigError(f"a judge is asked for some of {', '.join(JUDGED)}, not for {', '.join(self.metrics)!r}")

    def check(self, prompts: PromptSet) -> None:
        """Raise ConfigError unless the prompt set has every text that the metrics need."""
        for metric in self.metrics:
            for name in _TEXTS[metric]:
                prompts.text(name)


class StepCounts(NamedTuple):
    """Steps of one kind in one attempt: wrong ones among the known, all known ones, and those without a verdict."""

    suboptimal: int
    known: int
    unknown: int

    @classmethod
    def of(cls, flags: Sequence[StepFlag], kind: str) -> StepCounts:
        """Count the steps of a kind.

        >>> StepCounts.of([StepFlag("search", True), StepFlag("search", None), StepFlag("own", False)], "search")
        StepCounts(suboptimal=1, known=1, unknown=1)
        """
        verdicts = [flag.suboptimal for flag in flags if flag.kind == kind]
        return cls(verdicts.count(True), len(verdicts) - verdicts.count(None), verdicts.count(None))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A judge's verdicts on one attempt; None if it was not asked, and for `lasj` also if it gave no verdict."""

    lasj: bool | None = None
    searches: StepCounts | None = None  # steps with a search; needless ones are suboptimal
    own_steps: StepCounts | None = None  # steps without a search; false ones are suboptimal


NOT_JUDGED = Verdicts()


@dataclass(frozen=True, slots=True)
class Examiner:
    """Asks a judge about all attempts of one policy, right or wrong, in form or not: eq. 2 is over all their steps."""

    judge: JudgeService  # with the prompts of the policy's format: one of them, `hiprag/direct`, is sent to the policy
    policy: LLM  # made the attempts; it is asked again, by greedy decoding and without a search
    metrics: Sequence[str]  # some of `JUDGED`

    def describe(self) -> dict[str, Any]:
        metrics = [metric for metric in JUDGED if metric in self.metrics]
        return {"model": self.judge.llm.name, "prompts": templates_fingerprint(self.judge.prompts), "metrics": metrics}

    async def examine(self, trajectory: Trajectory, reading: Reading, counts: Counter[str]) -> Verdicts:
        """Return the verdicts on a finished attempt, given also as its format reads it.

        If the judge or the policy fails, a verdict is unknown; the attempt's other scores do not change. `counts` are
        incremented by name: `answer.asked`, `answer.unknown`, `answer.CAUSE`; `over.*` and `under.*` as
        `rewards.hiprag.detect` counts them; `regenerated`.
        """
        lasj = await self._lasj(trajectory, counts) if "lasj" in self.metrics else None
        flags = await self._flags(reading, counts)
        searches = StepCounts.of(flags, "search") if "osr" in self.metrics else None
        return Verdicts(lasj, searches, StepCounts.of(flags, "own") if "usr" in self.metrics else None)

    async def _lasj(self, trajectory: Trajectory, counts: Counter[str]) -> bool | None:
        """Return whether the answer means the same as a golden one; a missing answer does not, and costs no call."""
        if trajectory.answer is None:
            return False
        counts["answer.asked"] += 1
        try:
            return await answer_matches(self.judge, trajectory.answer, trajectory.question.golden_answers)
        except (Interrupted, InputError):
            raise
        except Exception as error:
            counts["answer.unknown"] += 1
            counts[f"answer.{cause_of(error)}"] += 1
            return None

    async def _flags(self, reading: Reading, counts: Counter[str]) -> list[StepFlag]:
        """Return a flag per step; steps of a metric that is not asked for cost no call."""
        over, under = "osr" in self.metrics, "usr" in self.metrics
        if not (over or under):
            return []
        try:
            (flags,) = await detect(
                [reading], judge=self.judge, policy=self.policy, over_search=over, under_search=under, counts=counts
            )
        except (Interrupted, InputError):
            raise
        except Exception as error:  # some policies answer no prompts but those of their format
            cause = cause_of(error)
            flags = [StepFlag("search" if block.is_search else "own", None) for block in reading.blocks]
            for is_asked, detector, kind in ((over, "over", "search"), (under, "under", "own")):
                unknown = is_asked * sum(flag.kind == kind for flag in flags)
                counts.update({f"{detector}.unknown": unknown, f"{detector}.{cause}": unknown})
        return flags
