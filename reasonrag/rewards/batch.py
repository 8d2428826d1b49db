"""`BatchReward`, the base class of the shipped rewards: common components, failures that are no scores, schedules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import structlog

from reasonrag.core.errors import BackendError, InputError, Interrupted
from reasonrag.core.secrets import excerpt
from reasonrag.core.text import cover_match, exact_match, token_f1
from reasonrag.core.types import Search, Trajectory
from reasonrag.formats.base import Reading
from reasonrag.rewards.base import RewardParts, Score
from reasonrag.rollout import gather_all

log = structlog.get_logger()

Parts = dict[str, float | None]


def common_parts(trajectory: Trajectory, reading: Reading) -> Parts:
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
    """Return the whole trajectory as text, with what searches found: its growing turn, or the texts of its steps."""
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
    parts: Parts


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
        read_or_failed = [self._read(trajectory) for trajectory in trajectories]
        batch = [read for read in read_or_failed if isinstance(read, Read)]
        try:
            values = iter(await self._values(batch, step))
        except (Interrupted, InputError):
            raise
        except Exception as error:
            values = iter([Score(None, read.parts, cause_of(error)) for read in batch])
        scores = [finite(next(values) if isinstance(read, Read) else read) for read in read_or_failed]
        self.counts.update(score.cause for score in scores if score.value is None)
        return scores

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

    async def _settled(self, read: Read, scoring: Coroutine[Any, Any, float | Score]) -> Score:
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


class RiseWatch:
    """Detects when a number that is reported once per training step stops rising.

    It has stopped at the first step after which the mean of the last `window` numbers is at most `min_rise` above the
    mean of the `window` before them. Steps that were reported before are ignored, so that a step repeated after a
    restart counts once.

    >>> watch = RiseWatch(window=2, min_rise=0.1)
    >>> for step, rc in enumerate([0.0, 0.5, 1.0, 1.5, 1.5, 1.5, 1.5]):
    ...     watch.add(rc, step)
    >>> watch.stopped_at  # two windows of 1.5; a step before it was 1.25, then 1.5
    6
    """

    def __init__(self, window: int, min_rise: float) -> None:
        self.window = window
        self.min_rise = min_rise
        self.stopped_at: int | None = None
        self._last_step: int | None = None
        self._numbers: list[float] = []

    def add(self, number: float, step: int) -> None:
        """Take the number of a step into account."""
        if self.stopped_at is not None or (self._last_step is not None and step <= self._last_step):
            return
        self._last_step = step
        self._numbers = [*self._numbers, number][-2 * self.window :]
        before, recent = self._numbers[: self.window], self._numbers[self.window :]
        if len(recent) == self.window and math.fsum(recent) - math.fsum(before) <= self.min_rise * self.window:
            self.stopped_at = step

    def state(self) -> dict[str, Any]:
        return {"stopped_at": self.stopped_at, "last": self._last_step, "numbers": list(self._numbers)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stopped_at = state.get("stopped_at")
        self._last_step = state.get("last")
        self._numbers = list(state.get("numbers", ()))
