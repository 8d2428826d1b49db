"""Trajectories with their rewards, as a trainer and a log take them."""

from __future__ import annotations

from dataclasses import dataclass, field

from reasonrag.core.types import Question, Trajectory
from reasonrag.online_rl.transcript import Transcript
from reasonrag.rewards.base import Score


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt of a group.

    `trajectory` is None where the policy's backend gave up on it; the score has no value then.
    """

    question: Question
    index: int  # within its group
    trajectory: Trajectory | None
    transcript: Transcript
    score: Score


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one question by one policy: `samples` are `[G]`."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> list[float | None]:
        """`[G]`; None where there is no verdict."""
        return [sample.score.value for sample in self.samples]


@dataclass(slots=True)
class Batch:
    """The rollouts of one training step, and what they took.

    Attributes:
        groups: whole groups, in the order of their places.
        dropped: groups that were left out because all their rewards were equal.
        flat: groups of that kind that had to stay, as no round was left.
        rounds: of refilling.
        retried: trajectories whose reward was asked for again.
        unscored: by cause.
        seconds: of rolling out and of scoring.
    """

    groups: list[Group]
    dropped: int = 0
    flat: int = 0
    rounds: int = 0
    retried: int = 0
    unscored: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        """Of all groups, one after the other."""
        return [sample for group in self.groups for sample in group.samples]
