"""Checks during online training: validation, the best policy so far, and guards against a collapse."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import structlog

from reasonrag.core.types import Question
from reasonrag.llm.base import Sampling
from reasonrag.online_rl.advantages import has_variance
from reasonrag.online_rl.collector import roll_out
from reasonrag.online_rl.rollout_log import trajectory_metrics
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.retrieval.base import Retriever
from reasonrag.rewards.base import Reward
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.questions import questions_fingerprint

log = structlog.get_logger()

STATE = "online_rl.json"
_EQUAL_AGAIN = 10  # batches between two lines about equal rewards


@dataclass
class Guards:
    """Detect a collapse from the metrics of each batch, averaged over a window so that one bad batch is tolerated."""

    window: ClassVar = 10  # batches

    settings: GuardSettings
    seen: dict[str, deque[float]] = field(default_factory=dict)
    best_format: float = 0.0
    first_length: float | None = None

    def update(self, metrics: dict[str, float]) -> str:
        """Update with one batch's metrics; return the reason to stop training, or ""."""
        format_rate = self._mean("format", metrics.get("rollout/format_rate"))
        length = self._mean("length", metrics.get("rollout/tokens"))
        settings = self.settings
        if format_rate is not None:
            self.best_format = max(self.best_format, format_rate)
            if settings.format_rate_drop and format_rate < self.best_format - settings.format_rate_drop:
                return f"well-formed trajectories fell from {self.best_format:.2f} to {format_rate:.2f}"
        if length is not None:
            self.first_length = self.first_length or length
            if settings.max_length_growth and length > settings.max_length_growth * self.first_length:
                return f"trajectories grew from {self.first_length:.0f} to {length:.0f} tokens"
        return ""

    def state(self) -> dict[str, Any]:
        return {
            "seen": {name: list(values) for name, values in self.seen.items()},
            "best_format": self.best_format,
            "first_length": self.first_length,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = {name: deque(values, self.window) for name, values in state["seen"].items()}
        self.best_format, self.first_length = state["best_format"], state["first_length"]

    def _mean(self, name: str, value: float | None) -> float | None:
        """Return the mean over the last window; None while the window is not full."""
        if value is None:
            return None
        values = self.seen.setdefault(name, deque(maxlen=self.window))
        values.append(value)
        return fmean(values) if len(values) == self.window else None


@dataclass
class Validation:
    """Held-out questions, one attempt each, whose metrics choose the best policy."""

    questions: Sequence[Question]
    engine: Engine  # runs the policy with the sampling of validation
    reward: Reward  # scores the attempts, if the reward is the metric
    metric: str  # chooses the best policy
    seed: int
    best: float | None = None
    best_step: int | None = None

    async def run(self, step: int, *, process: int = 0, processes: int = 1) -> list[dict[str, float]]:
        """Return the metrics of each question of this process's share, with the reward if it is the metric.

        A question on which the policy's backend fails is left out, and a missing reward is left out of its metrics.
        """
        share = self.questions[process::processes]
        seeds = [derive_seed(self.seed, "validation", question.dataset, question.id) for question in share]
        attempts = await gather_all(roll_out(self.engine, q, seed) for q, seed in zip(share, seeds, strict=True))
        finished = [trajectory for trajectory, _ in attempts if trajectory is not None]
        rows = [trajectory_metrics(trajectory, self.engine.format) for trajectory in finished]
        if self.metric == "reward" and finished:
            for row, score in zip(rows, await self.reward.score(finished, step=step), strict=True):
                if score.value is not None:
                    row["reward"] = score.value
        return rows

    def is_best(self, means: dict[str, float], step: int) -> bool:
        """Return whether these metrics are the best so far, and remember them if they are."""
        value = means.get(self.metric)
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def state(self) -> dict[str, Any]:
        """Return the best so far, and the conditions under which a later value can be compared with it."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "metric": self.metric,
            "questions": questions_fingerprint(self.questions),
            "corpus": self.engine.retriever.fingerprint,
            "temperature": self.engine.sampling.temperature,
        }

    def restore(self, state: object) -> None:
        """Resume from `state()`, without the best so far if the metric, the questions or the sampling changed."""
        saved = state if isinstance(state, dict) else {}
        own = self.state()
        changed = [name for name in own if not name.startswith("best") and saved.get(name) != own[name]]
        if not changed:
            self.best, self.best_step = saved["best"], saved["best_step"]
        elif state is not None:
            self.best = self.best_step = None
            log.warning("validation has changed, so the search for the best policy restarts", changed=changed)


def validation_engine(engine: Engine, *, temperature: float, retriever: Retriever | None = None) -> Engine:
    """Return an engine with the same policy, sampling as in evaluation; the same retriever unless one is given."""
    held_out_engine = copy.copy(engine)
    held_out_engine.retriever = retriever or engine.retriever
    held_out_engine.sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=engine.sampling.max_tokens)
    return held_out_engine


@dataclass
class Watch:
    """Guards, validation and reward of a training run, saved and restored together."""

    guards: Guards
    validation: Validation | None
    reward: Reward
    every: int  # steps between two validations
    by_group: bool = True  # whether only rewards of a group are compared
    metrics: dict[str, float] = field(default_factory=dict)  # of the last batch
    collapse: str = ""  # why the guards have stopped the run
    equal: int = 0  # batches in a row in which no group had two different rewards

    def equal_rewards(self, rewards: Sequence[float | None]) -> str:
        """Return what to say of the last batch if no group of it has two different rewards, else "".

        It is said of the first such batch, and then of each tenth one in a row.

        Args:
            rewards: those of the whole batch; None where one is missing.
        """
        flat = self.metrics.get("rollout/flat_groups") == 1.0 if self.by_group else not has_variance(rewards)
        self.equal = self.equal + 1 if flat else 0
        known = sorted({reward for reward in rewards if reward is not None})
        if not known or self.equal % _EQUAL_AGAIN != 1:
            return ""
        values = f"all {known[0]:g}" if len(known) == 1 else f"from {known[0]:g} to {known[-1]:g}, alike in each group"
        in_form = self.metrics.get("rollout/format_rate", 0.0)
        lasting = "" if self.equal == 1 else f", {self.equal} steps in a row"
        return (
            f"the rewards of every group are equal ({values}; {in_form:.0%} in form){lasting}: there is nothing to "
            "learn from these rollouts. Take questions that the policy solves at times, a larger --group-size or "
            "another reward, or train it on demonstrations first (sft train --examples trajectories)"
        )

    def save(self, folder: Path) -> None:
        state = {
            "guards": self.guards.state(),
            "reward": self.reward.state(),
            "validation": None if self.validation is None else self.validation.state(),
        }
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.guards.restore(state["guards"])
        self.reward.restore(state["reward"])
        if self.validation is not None:
            self.validation.restore(state.get("validation", {}))


def mean_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it.

    >>> mean_metrics([{"em": 1.0, "reward": 0.5}, {"em": 0.0}])
    {'em': 0.5, 'reward': 0.5}
    """
    names = sorted({name for row in rows for name in row})
    return {name: fmean(row[name] for row in rows if name in row) for name in names}
