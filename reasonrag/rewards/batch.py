"""What all rewards share: the parts that every score has, failures that are no scores, and when a schedule moves on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from reasonrag.core.errors import BackendError, InputError, Interrupted
from reasonrag.core.secrets import redact
from reasonrag.core.text import cover_match, exact_match, token_f1
from reasonrag.core.types import Search, Trajectory
from reasonrag.formats.base import Reading
from reasonrag.rewards.base import RewardParts, Score
from reasonrag.rollout import gather_all

log = structlog.get_logger()

Parts = dict[str, float | None]


def common_parts(trajectory: Trajectory, reading: Reading) -> Parts:
    """What every score tells: `em`, `f1`, `cem` in [0, 1], `rc` (retrievals), `well_formed` 0 or 1.

    A trajectory without an answer has em, f1 and cem 0: it has ended, so that is known.
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
    """What the retriever was asked for, in order."""
    return tuple(step.action.query for step in trajectory.steps if isinstance(step.action, Search))


def finite(score: Score) -> Score:
    """The score itself, or none at all where a number in it is not one.

    >>> finite(Score(float("nan"), {"em": 1.0}))
    Score(value=None, parts={'em': 1.0}, cause='not_finite')
    """
    whole = {name: None if part is None or not math.isfinite(part) else part for name, part in score.parts.items()}
    broken = any(part is not None and whole[name] is None for name, part in score.parts.items())
    if broken or (score.value is not None and not math.isfinite(score.value)):
        return Score(None, whole, "not_finite")
    return score


@dataclass(frozen=True, slots=True)
class Read:
    """A trajectory that has ended, as its format reads it; whoever scores it writes down what it finds in `parts`."""

    trajectory: Trajectory
    reading: Reading
    parts: Parts


class BatchReward:
    """A reward without memory. A subclass says what one trajectory is worth, or a whole batch.

    Attributes:
        counts: scores without a value by cause, over the reward's life.
    """

    def __init__(self, parts: RewardParts) -> None:
        self.format = parts.format
        self.counts: Counter[str] = Counter()

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """`[B]` scores, in order. What fails (a backend, a bug, a number that is none) is a score without a value.

        Raises:
            Interrupted: the run is draining, and something would have to be paid for.
            InputError: no trajectory can be scored: a prompt text is missing, the journal's disk is full.
        """
        read = [self._read(trajectory) for trajectory in trajectories]
        batch = [r for r in read if isinstance(r, Read)]
        try:
            values = iter(await self._values(batch, step))
        except (Interrupted, InputError):
            raise
        except Exception as error:
            values = iter([Score(None, r.parts, cause_of(error)) for r in batch])
        scores = [finite(next(values) if isinstance(r, Read) else r) for r in read]
        self.counts.update(score.cause for score in scores if score.value is None)
        return scores

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, Any]:
        """No memory."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """No memory."""

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        """Scores of a batch, concurrently; one that fails does not touch the others."""
        return await gather_all(self._settled(read, self._value(read, step)) for read in batch)

    async def _value(self, read: Read, step: int) -> float:
        """What one trajectory is worth; its components go into `read.parts`."""
        raise NotImplementedError

    def _read(self, trajectory: Trajectory) -> Read | Score:
        if trajectory.stop_reason is None:
            return Score(None, {}, "unfinished")
        try:
            reading = self.format.read(trajectory)
            return Read(trajectory, reading, common_parts(trajectory, reading))
        except Exception as error:
            return Score(None, {}, cause_of(error))

    async def _settled(self, read: Read, value: Coroutine[Any, Any, float]) -> Score:
        try:
            return Score(await value, read.parts)
        except (Interrupted, InputError):
            raise
        except Exception as error:
            return Score(None, read.parts, cause_of(error))


def cause_of(error: Exception) -> str:
    """The short name under which a failure is counted; a bug is logged too, as nobody would see it otherwise."""
    if isinstance(error, BackendError):
        return error.cause
    log.warning("a reward failed", error=redact(f"{type(error).__name__}: {error}")[:300])
    return f"bug:{type(error).__name__}"


class RiseWatch:
    """Notices when a number that is told once a training step has stopped rising, and does not forget it.

    It has stopped at the first step after which the mean of the last `window` numbers is at most `min_rise` above the
    mean of the `window` before them; with fewer than two windows of numbers it may still rise. Numbers of steps that
    were told before are ignored, so that steps done again after a restart count once.

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
        self._last: int | None = None
        self._numbers: list[float] = []

    def add(self, number: float, step: int) -> None:
        """Take the number of a step into account."""
        if self.stopped_at is not None or (self._last is not None and step <= self._last):
            return
        self._last = step
        self._numbers = [*self._numbers, number][-2 * self.window :]
        before, recent = self._numbers[: self.window], self._numbers[self.window :]
        if len(recent) == self.window and math.fsum(recent) - math.fsum(before) <= self.min_rise * self.window:
            self.stopped_at = step

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as JSON can hold it."""
        return {"stopped_at": self.stopped_at, "last": self._last, "numbers": list(self._numbers)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; `{}` begins anew."""
        self.stopped_at = state.get("stopped_at")
        self._last = state.get("last")
        self._numbers = list(state.get("numbers", ()))
