"""What is looked at while a policy trains online: validation, the best policy so far, and signs of a collapse."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.llm.base import Sampling
from reasonrag.online_rl.record import summary
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.rewards.base import Reward
from reasonrag.rollout.engine import Engine, derive_seed
from reasonrag.types import Question, Trajectory

STATE = "online_rl.json"


@dataclass
class Guards:
    """Tells a collapse from the figures of each step. Averages over a window, so that one bad batch is none.

    `seen` and `best` survive a restart; see `state`.
    """

    settings: GuardSettings
    seen: dict[str, deque[float]] = field(default_factory=dict)
    best_format: float = 0.0
    first_length: float | None = None

    def look(self, figures: dict[str, float], entropy: float | None) -> str:
        """Take the figures of a step; what is wrong, or ""."""
        format_rate = self._mean("format", figures.get("rollout/format_rate"))
        length = self._mean("length", figures.get("rollout/tokens"))
        spread = self._mean("entropy", entropy)
        settings = self.settings
        if format_rate is not None:
            self.best_format = max(self.best_format, format_rate)
            if settings.format_rate_drop and format_rate < self.best_format - settings.format_rate_drop:
                return f"well-formed trajectories fell from {self.best_format:.2f} to {format_rate:.2f}"
        if length is not None:
            self.first_length = self.first_length or length
            if settings.max_length_growth and length > settings.max_length_growth * self.first_length:
                return f"trajectories grew from {self.first_length:.0f} to {length:.0f} tokens"
        if spread is not None and settings.min_entropy and spread < settings.min_entropy:
            return f"the entropy fell to {spread:.4f} nats a token"
        return ""

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "seen": {name: list(values) for name, values in self.seen.items()},
            "best_format": self.best_format,
            "first_length": self.first_length,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.seen = {name: deque(values, self.settings.window) for name, values in state["seen"].items()}
        self.best_format, self.first_length = state["best_format"], state["first_length"]

    def _mean(self, name: str, value: float | None) -> float | None:
        """Over the last window; None while it is not full."""
        if value is None:
            return None
        values = self.seen.setdefault(name, deque(maxlen=self.settings.window))
        values.append(value)
        return fmean(values) if len(values) == self.settings.window else None


@dataclass
class Validation:
    """Held-out questions, one attempt each.

    Args:
        questions: of validation.
        engine: the policy's, with the sampling of validation.
        reward: scores them, where it is the metric that chooses.
        metric: which figure chooses the best policy.
        seed: of the sampling.
    """

    questions: Sequence[Question]
    engine: Engine
    reward: Reward
    metric: str
    seed: int
    best: float | None = None
    best_step: int | None = None

    async def look(self, step: int) -> dict[str, float]:
        """Means over the questions; the reward's among them if it chooses."""
        seeds = [derive_seed(self.seed, "validation", q.dataset, q.id) for q in self.questions]
        done = await self.engine.run([Trajectory(q) for q in self.questions], seeds=seeds)
        found = [summary(trajectory, self.engine.format) for trajectory in done]
        means = {name: fmean(row[name] for row in found) for name in found[0]}
        if self.metric == "reward":
            scored = [s.value for s in await self.reward.score(done, step=step) if s.value is not None]
            if scored:
                means["reward"] = fmean(scored)
        return means

    def is_best(self, means: dict[str, float], step: int) -> bool:
        """Whether these are better than any before; then they are the best from now on."""
        value = means.get(self.metric)
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True


def validation_engine(engine: Engine, *, temperature: float) -> Engine:
    """The same policy, asked as in evaluation."""
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=engine.sampling.max_tokens)
    return Engine(
        engine.llm, engine.retriever, engine.format, max_steps=engine.max_steps, top_k=engine.top_k, sampling=sampling
    )


@dataclass
class Watch:
    """All of it, as one thing that is asked, saved and restored."""

    guards: Guards
    validation: Validation | None
    reward: Reward
    every: int  # steps between two validations
    figures: dict[str, float] = field(default_factory=dict)  # of the last batch

    def save(self, folder: Path) -> None:
        """Into a checkpoint."""
        validation = self.validation
        state = {
            "guards": self.guards.state(),
            "reward": self.reward.state(),
            "best": None if validation is None else [validation.best, validation.best_step],
        }
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """From a checkpoint."""
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.guards.restore(state["guards"])
        self.reward.restore(state["reward"])
        if self.validation is not None and state["best"] is not None:
            self.validation.best, self.validation.best_step = state["best"]


def callbacks(watch: Watch, trainer: Any, save_best: Callable[[], None]) -> list[Any]:
    """Those that validate, keep the best policy, and end a training that collapses."""
    from transformers import TrainerCallback

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self._validate(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            entropies = trainer._metrics["train"].get("entropy")
            trainer.collapse = watch.guards.look(watch.figures, entropies[-1] if entropies else None)
            if trainer.collapse:
                control.should_training_stop = control.should_save = True
            if watch.every and (step % watch.every == 0 or step >= state.max_steps):
                self._validate(step)

        def _validate(self, step: int) -> None:
            validation = watch.validation
            if validation is None:
                return
            with trainer.rolling(step):
                means = trainer.rollouts.runner.run(validation.look(step))
            trainer.log({f"eval_{name}": value for name, value in means.items()})
            if validation.is_best(means, step):
                save_best()

    return [Looking()]
