"""The Reward protocol: finished trajectories to scores that explain themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.types import Trajectory
from reasonrag.formats.base import Format
from reasonrag.llm.base import LLM

if TYPE_CHECKING:
    from reasonrag.rewards.judge import JudgeService
    from reasonrag.rewards.verdicts import ReferencePlan


# The cause of a score that a reward function leaves out on purpose: it is no outage, and asking again changes nothing.
NO_REWARD = "no_reward"


@dataclass(frozen=True, slots=True)
class Score:
    """What a trajectory earns.

    `value` is None where it could not be told, as after a judge's failure: such a trajectory is left out, and
    `cause` says why. `parts` are all components by name, so that the value can be explained; None where one is unknown.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: str = ""


class Reward(Protocol):
    """Scores trajectories of one format. Safe to call from many tasks at once."""

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """`[B]` scores of trajectories that have ended.

        Args:
            trajectories: such as the group of one question.
            step: optimizer steps taken so far, for rewards that change as training goes on.

        Never raises for a judge or a model that fails: the score of that trajectory has no value then.
        """
        ...

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Told once a training step of all its scores, in order: for schedules that depend on how training goes."""
        ...

    def state(self) -> dict[str, Any]:
        """What has to survive a restart, as JSON can hold it; `{}` of a reward that has no memory."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        ...


class Encoder(Protocol):
    """Texts to vectors whose cosine says how alike they are. Safe to call from many tasks at once."""

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """`[n][d]` one vector a text; only vectors of one call can be compared with each other."""
        ...


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What rewards are made of; each takes what it needs, and says at once what is missing.

    `judge` answers the questions that rules cannot; `policy` is the model in training, which HiPRAG asks again without
    a search; `encoder` compares queries; `plans` are Search-P1's, by data set and question id.
    """

    format: Format
    judge: JudgeService | None = None
    policy: LLM | None = None
    encoder: Encoder | None = None
    plans: Mapping[tuple[str, str], ReferencePlan] = field(default_factory=dict)
