"""Rewards score finished trajectories and explain each score; a failure is never a score.

`Reward` is the protocol. `BatchReward` is the base class of the shipped rewards: one trajectory at a time, with the
components that all rewards report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from reasonrag.core.errors import BackendError, InputError, Interrupted
from reasonrag.core.text import cover_match, exact_match, excerpt, token_f1
from reasonrag.core.types import Search, Trajectory
from reasonrag.formats.base import Format, Reading
from reasonrag.llm.base import LLM, StepScorer
from reasonrag.rollout import gather_all

if TYPE_CHECKING:
    from reasonrag.rewards.judge import JudgeService, ReferencePlan

log = structlog.get_logger()

Components = dict[str, float | None]

# The cause of a score that a reward function leaves out on purpose. Scoring the trajectory again changes nothing.
NO_REWARD = "no_reward"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one trajectory.

    `value` is None if it is unknown, for example after a judge's failure: the trajectory is then left out, and `cause`
    names the reason. `parts` are all components by name, which explain the value; an unknown component is None. `steps`
    are rewards of its steps, in order, each credited to its step alone; () without any, None for a step without one.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: str = ""
    steps: tuple[float | None, ...] = ()


class Reward(Protocol):
    """Scores trajectories of one format. Safe to call from many tasks at once.

    A class may declare the parts of `RewardParts` that it uses as `needs`: a set of their names, or a static method
    that returns the set for `RewardSettings` and a format. Only these are opened. Without a declaration all parts are
    given that the settings name.
    """

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """Return `[B]` scores of trajectories that have ended.

        Args:
            trajectories: such as the group of one question.
            step: optimizer steps taken so far, for rewards that change during training.

        Never raises if a judge or a model fails: the score of that trajectory then has no value.
        """
        ...

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Receive all scores of a training step, once per step: for schedules that depend on them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what has to survive a restart, as JSON values; `{}` for a stateless reward."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the reward to what `state()` returned in the run that is resumed."""
        ...


class Encoder(Protocol):
    """Turns texts into vectors. Their cosine is the texts' similarity. Safe to call from many tasks at once."""

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][d]`, one vector per text; only vectors of the same call can be compared."""
        ...


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What rewards are built from. A reward names the parts that it needs in `needs`.

    `judge` decides what rules cannot; `policy` is the model being trained, which HiPRAG asks again without a search;
    `encoder` compares queries; `scorer` values steps; `plans` are Search-P1's, by data set and question id; `decode`
    turns sampled ids into text, if their log-probabilities are known.
    """

    format: Format
    judge: JudgeService | None = None
    policy: LLM | None = None
    encoder: Encoder | None = None
    scorer: StepScorer | None = None
    plans: Mapping[tuple[str, str], ReferencePlan] = field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] | None = None


# What to do if a part that a reward needs is missing.
MISSING = {
    "judge": "a judge; add --judge with a model that decides",
    "policy": "the policy, to ask what it knows without a search; set reward.hiprag.over_search to false",
    "encoder": "an encoder that compares queries; name one in reward.when_to_search.encoder",
    "scorer": "a process reward model; add --prm",
    "decode": "the log-probabilities of the policy's tokens, which only `rl train` knows; set "
    "reward.outcome.search_confidence to 0",
}


def common_parts(trajectory: Trajectory, reading: Reading) -> Components:
    """Return the components of every score: `em`, `f1`, `cem` in [0, 1], `rc` (retrievals), `well_formed` 0 or 1.

    Without an answer em, f1 and cem are 0 and not unknown: the trajectory has ended.
    """
    golden = trajectory.question.golden_answers
    return {
        "em": exact_match(trajectory.answer, golden),
        "f1": token_f1(trajectory.answer, golden),
        "cem": cover_match(trajectory.answer, golden),
        "rc": float(len(queries(trajectory))),
        "well_formed": float(reading.well_formed),
    }


def queries(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the queries that the retriever was sent, in order."""
    return tuple(step.action.query for step in trajectory.steps if isinstance(step.action, Search))


def trajectory_text(trajectory: Trajectory) -> str:
    """Return the whole trajectory as text, with the passages: its growing turn, or the texts of its steps."""
    if not trajectory.steps:
        return ""
    last = trajectory.steps[-1]
    if last.prompt.prefix or len(trajectory.steps) == 1:
        return last.prompt.prefix + last.completion.text
    texts = []
    for step, following in zip_longest(trajectory.steps, trajectory.steps[1:]):
        texts.append(step.completion.text)
        if isinstance(step.action, Search) and following and following.prompt.messages[-1].role == "tool":
            texts.append(f"<tool_response>\n{following.prompt.messages[-1].content}\n</tool_response>")
    return "\n".join(texts)


def finite(score: Score) -> Score:
    """Return the score, or one without a value if a number in it is NaN or infinite.

    >>> finite(Score(float("nan"), {"em": 1.0}))
    Score(value=None, parts={'em': 1.0}, cause='not_finite', steps=())
    """
    numbers = [score.value, *score.parts.values(), *score.steps]
    if all(number is None or math.isfinite(number) for number in numbers):
        return score
    parts = {name: part if part is not None and math.isfinite(part) else None for name, part in score.parts.items()}
    return Score(None, parts, "not_finite")


@dataclass(frozen=True, slots=True)
class Read:
    """A finished trajectory as its format reads it; a reward adds its components to `parts`."""

    trajectory: Trajectory
    reading: Reading
    parts: Components


class BatchReward:
    """A stateless reward. A subclass implements `_value` for one trajectory, or `_values` for a batch.

    Attributes:
        counts: scores without a value by cause, since the reward was made.
    """

    def __init__(self, parts: RewardParts) -> None:
        self.format = parts.format
        self.counts: Counter[str] = Counter()

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """Return `[B]` scores, in order. A backend or a reward that fails gives a score without a value.

        Raises:
            Interrupted: the run is shutting down, and a new call would be needed.
            InputError: no trajectory can be scored, for example without a prompt text or with a full disk.
        """
        scores: list[Score | None] = []
        batch: list[Read] = []
        for trajectory in trajectories:
            read = self._read(trajectory)
            if isinstance(read, Read):
                batch.append(read)
            scores.append(None if isinstance(read, Read) else read)
        try:
            values = iter(await self._values(batch, step))
        except (Interrupted, InputError):
            raise
        except Exception as error:
            values = iter([Score(None, read.parts, cause_of(error)) for read in batch])
        complete = [finite(next(values) if score is None else score) for score in scores]
        self.counts.update(score.cause for score in complete if score.value is None)
        return complete

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        """Score a batch concurrently; a trajectory that fails does not affect the others."""
        return await gather_all(self._settled(read, self._value(read, step)) for read in batch)

    async def _value(self, read: Read, step: int) -> float | Score:
        """Score one trajectory and put its components into `read.parts`."""
        raise NotImplementedError

    def _read(self, trajectory: Trajectory) -> Read | Score:
        if trajectory.stop_reason is None:
            return Score(None, {}, "unfinished")
        try:
            reading = self.format.read(trajectory)
            return Read(trajectory, reading, common_parts(trajectory, reading))
        except Exception as error:
            return Score(None, {}, cause_of(error))

    async def _settled(self, read: Read, scoring: Awaitable[float | Score]) -> Score:
        try:
            scored = await scoring
        except (Interrupted, InputError):
            raise
        except Exception as error:
            return Score(None, read.parts, cause_of(error))
        return scored if isinstance(scored, Score) else Score(scored, read.parts)


def cause_of(error: Exception) -> str:
    """Return the short name under which a failure is counted. A bug is logged as well: nothing else would show it."""
    if isinstance(error, BackendError):
        return error.cause
    log.warning("a reward failed", error=excerpt(f"{type(error).__name__}: {error}"))
    return f"bug:{type(error).__name__}"
