"""What only a judge can tell of an attempt: is its answer right in meaning, which searches were needless or missing.

LasJ is that of When-to-search, sec. 4.1; OSR and USR are those of HiPRAG, eq. 2 (arXiv:2510.07794).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, InputError, Interrupted
from reasonrag.core.types import Trajectory
from reasonrag.formats.base import PromptSet, Reading
from reasonrag.llm.base import LLM
from reasonrag.rewards.batch import cause_of
from reasonrag.rewards.hiprag import StepFlag, detect
from reasonrag.rewards.judge import JudgeService
from reasonrag.rewards.verdicts import answer_matches
from reasonrag.storage.parquet import Row

JUDGED = ("lasj", "osr", "usr")

# What each metric needs of a prompt set, and under which name it is counted.
_TEXTS = {
    "lasj": ("judge/answer",),
    "osr": ("judge/same_meaning", "hiprag/direct"),
    "usr": ("judge/step_holds",),
}
COUNTED_AS = {"lasj": "answer", "osr": "over", "usr": "under"}


@dataclass(frozen=True, slots=True)
class Judging:
    """A judge, and which metrics of `JUDGED` it is asked for; all of them unless told otherwise."""

    model: ModelConfig
    metrics: tuple[str, ...] = JUDGED

    def __post_init__(self) -> None:
        if not self.metrics or not set(self.metrics) <= set(JUDGED):
            raise ConfigError(f"a judge is asked for some of {', '.join(JUDGED)}, not for {', '.join(self.metrics)!r}")

    def check(self, prompts: PromptSet) -> None:
        """See that a prompt set has every text that will be needed.

        Raises:
            ConfigError: it has not.
        """
        for metric in self.metrics:
            for name in _TEXTS[metric]:
                prompts.text(name)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of one kind in one attempt: those of which it is known, how many of them were wrong to take, the others."""

    suboptimal: int
    known: int
    unknown: int

    @classmethod
    def of(cls, flags: Sequence[StepFlag], kind: str) -> StepCounts:
        """Those of a kind.

        >>> StepCounts.of([StepFlag("search", True), StepFlag("search", None), StepFlag("own", False)], "search")
        StepCounts(suboptimal=1, known=1, unknown=1)
        """
        found = [flag.suboptimal for flag in flags if flag.kind == kind]
        return cls(found.count(True), len(found) - found.count(None), found.count(None))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a judge found in one attempt; None where it was not asked.

    `lasj` is None too where it was asked and gave no verdict. `searches` and `own_steps` are those with a search and
    without one: suboptimal are the needless searches, and the false steps.
    """

    lasj: bool | None = None
    searches: StepCounts | None = None
    own_steps: StepCounts | None = None

    def steps(self, metric: str) -> StepCounts | None:
        """The steps of `osr` or `usr`."""
        return self.searches if metric == "osr" else self.own_steps

    def row(self) -> Row:
        """The columns of `tables.trajectory_schema`."""
        return {
            "lasj": self.lasj,
            "steps_over": self.searches and self.searches.suboptimal,
            "searches_known": self.searches and self.searches.known,
            "steps_under": self.own_steps and self.own_steps.suboptimal,
            "own_steps_known": self.own_steps and self.own_steps.known,
        }


NOT_JUDGED = Verdicts()


class Examiner:
    """Asks a judge about the attempts of one policy, right or wrong, in form or not: eq. 2 is over all their steps."""

    def __init__(self, judge: JudgeService, policy: LLM, metrics: Sequence[str]) -> None:
        """Put the parts together.

        Args:
            judge: with the prompts of the policy's format, as `hiprag/direct` among them is for the policy.
            policy: the one that made the attempts; it is asked again, greedily, without a search.
            metrics: some of `JUDGED`.
        """
        self.judge = judge
        self.policy = policy
        self.metrics = metrics

    async def examine(self, trajectory: Trajectory, reading: Reading, counts: Counter[str]) -> Verdicts:
        """The verdicts on an attempt that has ended.

        A judge or a policy that fails leaves a verdict unknown, and never touches the attempt's other scores.

        Args:
            trajectory: the attempt.
            reading: of it.
            counts: added to, by name: `answer.asked`, `answer.unknown`, `answer.CAUSE`; with `over` and `under` as
                `search_need.detect` counts them; `regenerated`.

        Raises:
            Interrupted: the run is draining.
            InputError: the journal's disk is full, or a prompt text is gone.
        """
        lasj = await self._lasj(trajectory, counts)
        flags = await self._flags(reading, counts)
        return Verdicts(
            lasj,
            StepCounts.of(flags, "search") if "osr" in self.metrics else None,
            StepCounts.of(flags, "own") if "usr" in self.metrics else None,
        )

    async def _lasj(self, trajectory: Trajectory, counts: Counter[str]) -> bool | None:
        """Whether the answer means the same as a golden one; a missing answer is none, and costs no call."""
        if "lasj" not in self.metrics:
            return None
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
        """A flag a step. What is not asked for is flagged without a call, and not looked at."""
        over, under = "osr" in self.metrics, "usr" in self.metrics
        if not (over or under):
            return []
        try:
            (flags,) = await detect(
                [reading], judge=self.judge, policy=self.policy, over_search=over, under_search=under, counts=counts
            )
        except (Interrupted, InputError):
            raise
        except Exception as error:  # a policy that cannot be asked anything but its format's prompts
            cause = cause_of(error)
            flags = [StepFlag("search" if block.is_search else "own", None) for block in reading.blocks]
            for asked, detector, kind in ((over, "over", "search"), (under, "under", "own")):
                unknown = asked * sum(flag.kind == kind for flag in flags)
                counts.update({f"{detector}.unknown": unknown, f"{detector}.{cause}": unknown})
        return flags
