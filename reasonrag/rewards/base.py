"""The Reward protocol: finished trajectories to scores that explain themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.types import Trajectory
from reasonrag.formats.base import Format
from reasonrag.llm.base import LLM, StepScorer

if TYPE_CHECKING:
    from reasonrag.rewards.judge import JudgeService
    from reasonrag.rewards.verdicts import ReferencePlan


# The cause of a score that a reward function leaves out on purpose: it is no outage, and asking again changes nothing.
NO_REWARD = "no_reward"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one trajectory.

    `value` is None if it is unknown, for example after a judge's failure: the trajectory is then left out, and `cause`
    says why. `parts` are all components by name, which explain the value; an unknown component is None. `steps` are
    rewards of its steps, in order, which are credited to each alone; () for none, None for a step without one.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: str = ""
    steps: tuple[float | None, ...] = ()


class Reward(Protocol):
    """Scores trajectories of one format. Safe to call from many tasks at once."""

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """Return `[B]` scores of trajectories that have ended.

        Args:
            trajectories: such as the group of one question.
            step: optimizer steps taken so far, for rewards that change during training.

        Never raises if a judge or a model fails: the score of that trajectory then has no value.
        """
        ...

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Take note of all scores of a training step, once per step: for schedules that depend on them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what has to survive a restart, as JSON values; `{}` for a stateless reward."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the reward to what `state()` returned in the run that is resumed."""
        ...


class Encoder(Protocol):
    """Turns texts into vectors whose cosine is their similarity. Safe to call from many tasks at once."""

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][d]`, one vector per text; only vectors of the same call can be compared."""
        ...


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What rewards are built from; each takes what it needs, and raises at once if that is missing.

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
