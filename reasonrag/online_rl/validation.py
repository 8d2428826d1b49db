"""What is looked at while a policy trains online: validation, the best policy so far, and signs of a collapse."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import structlog

from reasonrag.core.types import Question
from reasonrag.llm.base import Sampling
from reasonrag.online_rl.collector import roll_out
from reasonrag.online_rl.rollout_log import summary
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.retrieval.base import Retriever
from reasonrag.rewards.base import Reward
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.questions import questions_fingerprint

log = structlog.get_logger()

STATE = "online_rl.json"


@dataclass
class Guards:
    """Tells a collapse from the figures of each batch. Averages over a window, so that one bad batch is none.

    `seen` and `best` survive a restart; see `state`.
    """

    settings: GuardSettings
    seen: dict[str, deque[float]] = field(default_factory=dict)
    best_format: float = 0.0
    first_length: float | None = None

    def look(self, figures: dict[str, float], entropy: float | None) -> str:
        """Take the figures of a batch; what is wrong, or ""."""
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

    async def look(self, step: int, *, process: int = 0, processes: int = 1) -> list[dict[str, float]]:
        """Figures of each question of this process's share; the reward's among them if it chooses.

        A question that the policy's backend gives up on, or whose reward is missing, is left out of the figure.
        """
        mine = self.questions[process::processes]
        seeds = [derive_seed(self.seed, "validation", question.dataset, question.id) for question in mine]
        made = await gather_all(roll_out(self.engine, q, seed) for q, seed in zip(mine, seeds, strict=True))
        done = [trajectory for trajectory, _ in made if trajectory is not None]
        found = [summary(trajectory, self.engine.format) for trajectory in done]
        if self.metric == "reward" and done:
            for row, score in zip(found, await self.reward.score(done, step=step), strict=True):
                if score.value is not None:
                    row["reward"] = score.value
        return found

    def is_best(self, means: dict[str, float], step: int) -> bool:
        """Whether these are better than any before; then they are the best from now on."""
        value = means.get(self.metric)
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the best so far, with all that a later score has to share to be compared with it."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "metric": self.metric,
            "questions": questions_fingerprint(self.questions),
            "corpus": self.engine.retriever.fingerprint,
            "temperature": self.engine.sampling.temperature,
        }

    def restore(self, state: object) -> None:
        """Go on from `state()`. The best by another metric, or on other questions, is none: it begins anew."""
        before = state if isinstance(state, dict) else {}
        own = self.state()
        changed = [name for name in own if not name.startswith("best") and before.get(name) != own[name]]
        if not changed:
            self.best, self.best_step = before["best"], before["best_step"]
        elif state is not None:
            self.best = self.best_step = None
            log.warning("validation has changed, so the best policy is looked for anew", changed=changed)


def validation_engine(engine: Engine, *, temperature: float, retriever: Retriever | None = None) -> Engine:
    """The same policy, asked as in evaluation; it searches where the engine does if no retriever is given."""
    return Engine(
        engine.llm,
        retriever or engine.retriever,
        engine.format,
        max_steps=engine.max_steps,
        top_k=engine.top_k,
        sampling=Sampling(temperature=temperature, top_p=1.0, max_tokens=engine.sampling.max_tokens),
    )


@dataclass
class Watch:
    """All of it, as one thing that is asked, saved and restored."""

    guards: Guards
    validation: Validation | None
    reward: Reward
    every: int  # steps between two validations
    figures: dict[str, float] = field(default_factory=dict)  # of the last batch
    collapse: str = ""  # why the guards have stopped the run

    def save(self, folder: Path) -> None:
        """Into a checkpoint."""
        state = {
            "guards": self.guards.state(),
            "reward": self.reward.state(),
            "validation": None if self.validation is None else self.validation.state(),
        }
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """From a checkpoint."""
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.guards.restore(state["guards"])
        self.reward.restore(state["reward"])
        if self.validation is not None:
            self.validation.restore(state.get("validation", {}))


def mean_figures(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means by name, each over the rows that have it.

    >>> mean_figures([{"em": 1.0, "reward": 0.5}, {"em": 0.0}])
    {'em': 0.5, 'reward': 0.5}
    """
    names = sorted({name for row in rows for name in row})
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def callbacks(watch: Watch, trainer: Any, save_best: Callable[[], None]) -> list[Any]:
    """Those that validate, keep the best policy, and end a training that collapses."""
    from accelerate.utils import gather_object
    from transformers import TrainerCallback

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self._validate(args, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if step % trainer.rollouts.batch_steps == 0:
                entropies = trainer._metrics["train"].get("entropy")
                watch.collapse = watch.guards.look(watch.figures, entropies[-1] if entropies else None)
            if watch.collapse:
                control.should_training_stop = control.should_save = True
            if watch.every and (step % watch.every == 0 or step >= state.max_steps):
                due = control.should_log  # of the step itself: what is logged meanwhile takes it back
                self._validate(args, step)
                control.should_log = due

        def _validate(self, args: Any, step: int) -> None:
            validation = watch.validation
            if validation is None:
                return
            found = trainer.together(
                lambda: validation.look(step, process=args.process_index, processes=args.world_size), step=step
            )
            means = mean_figures(gather_object(found))
            if not means:
                return
            trainer.log({f"eval_{name}": value for name, value in means.items()})
            if validation.is_best(means, step):
                save_best()

    return [Looking()]
