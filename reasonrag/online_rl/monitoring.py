"""Checks and logs of online training: metrics of batches, validation, the best policy, guards against a collapse.

OUT/rollouts/step-000007.parquet    one row per trajectory, with the components of its reward
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import structlog

from reasonrag.core.text import redact_data
from reasonrag.core.types import Question, Trajectory
from reasonrag.evaluation.metrics import Attempt, attempt_values
from reasonrag.formats import Format
from reasonrag.llm.base import Sampling
from reasonrag.online_rl.collector import Batch, roll_out
from reasonrag.online_rl.rows import Sample, has_variance
from reasonrag.online_rl.settings import GuardSettings, RLSettings
from reasonrag.retrieval.base import Retriever
from reasonrag.rewards.base import Reward, trajectory_text
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.questions import questions_fingerprint
from reasonrag.storage.tables import rollout_schema

log = structlog.get_logger()

STATE = "online_rl.json"
ANSWER_METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced")
_REPEAT_EQUAL = 10  # batches between two warnings of equal rewards


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
class Monitor:
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
        """Return a warning if every group of the last batch has equal rewards, else "".

        The first such batch is reported, and then each tenth one in a row.

        Args:
            rewards: those of the whole batch; None where one is missing.
        """
        flat = self.metrics.get("rollout/flat_groups") == 1.0 if self.by_group else not has_variance(rewards)
        self.equal = self.equal + 1 if flat else 0
        known = sorted({reward for reward in rewards if reward is not None})
        if not known or self.equal % _REPEAT_EQUAL != 1:
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


def open_monitor(
    settings: RLSettings, held_out: Sequence[Question], engine: Engine, retriever: Retriever, reward: Reward
) -> Monitor:
    """Return the monitor of a training run; validation samples as the settings say, and searches with `retriever`."""
    validation, chosen = None, settings.validation
    if held_out:
        tried = validation_engine(engine, temperature=chosen.temperature, retriever=retriever)
        validation = Validation(held_out, tried, reward, chosen.metric, settings.seed)
    return Monitor(Guards(settings.guards), validation, reward, chosen.steps, by_group=not settings.by_token)


def mean_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it.

    >>> mean_metrics([{"em": 1.0, "reward": 0.5}, {"em": 0.0}])
    {'em': 0.5, 'reward': 0.5}
    """
    names = sorted({name for row in rows for name in row})
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def write_rollouts(
    batch: Batch,
    advantages: Sequence[float],
    row_advantages: Sequence[float],
    folder: Path,
    *,
    step: int,
    process: int,
    format: Format,
) -> None:
    """Write this process's rollouts for training step `step + 1`; after a restart, a repeated step replaces its file.

    Args:
        batch: the numbers are in the order of its samples and their transcripts.
        advantages: `[N]`, one per trajectory, as in the loss.
        row_advantages: `[R]`, one per training row: the mean over its tokens if each token has its own.
        folder: of all steps.
        step: steps before this batch.
        process: number of this process.
        format: of the trajectories.
    """
    rows = []
    remaining = iter(row_advantages)
    for sample, advantage in zip(batch.samples, advantages, strict=True):
        of_rows = [next(remaining) for _ in sample.transcripts]
        # Secrets are redacted only here: the trainer needs the exact tokens that the policy sampled.
        rows.append(redact_data(_log_row(sample, advantage, of_rows, step + 1, format), "a rollout"))
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{process}" if process else ""
    write_parquet(folder / f"step-{step + 1:06d}{suffix}.parquet", rows, rollout_schema())


def batch_metrics(batch: Batch, format: Format) -> dict[str, float]:
    """Return means over a batch, by name.

    `rollout/reward` and `reward/PART` are means over the trajectories that have them, `rollout/...` over the
    trajectories that did not fail; `unscored/CAUSE` counts the trajectories without a reward.
    """
    samples = batch.samples
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for part, value in sample.score.parts.items():
            if value is not None:
                values[f"reward/{part}"].append(float(value))
        if sample.trajectory is not None:
            for name, value in trajectory_metrics(sample.trajectory, format).items():
                values[f"rollout/{name}"].append(value)
        if sample.score.value is not None:
            values["rollout/reward"].append(sample.score.value)
        values["rollout/tokens"].append(float(sample.policy_tokens))
        values["rollout/rows"].append(float(len(sample.transcripts)))
        values["rollout/truncated"].append(float(sample.truncated))
    metrics = {name: fmean(values[name]) for name in sorted(values)}
    metrics |= over_under([sample.score.parts for sample in samples])
    metrics["rollout/unscored"] = (len(samples) - len(values["rollout/reward"])) / len(samples)
    metrics |= {f"unscored/{cause}": float(count) for cause, count in sorted(batch.unscored.items())}
    return metrics | {
        "rollout/flat_groups": batch.flat / len(batch.groups),
        "rollout/dropped_groups": float(batch.dropped),
        "rollout/retried": float(batch.retried),
        "rollout/seconds": batch.seconds,
    }


def trajectory_metrics(trajectory: Trajectory, format: Format) -> dict[str, float]:
    """Return EM, F1, ACC, retrievals, steps, whether the answer was forced, and whether the form is right.

    `search_share` is the share of searches among the steps as the format separates them (arXiv:2510.07794, Fig. 2b).
    """
    known = attempt_values(Attempt(trajectory))
    metrics = {name: float(known[name] or 0.0) for name in ANSWER_METRICS}
    reading = format.read(trajectory)
    share = len(reading.queries) / max(1, len(reading.blocks))
    return metrics | {"format_rate": float(reading.well_formed), "search_share": share}


def over_under(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return OSR and USR of the known steps (arXiv:2510.07794, eq. 2), from the parts of HiPRAG's scores.

    A step without a readable verdict counts in neither number, and a rate without any known step is left out.
    """
    rates = {}
    for name, bad, total in (("osr", "over", "searches_known"), ("usr", "under", "own_steps_known")):
        known = sum(part.get(total) or 0.0 for part in parts)
        if known:
            rates[f"rollout/{name}"] = sum(part.get(bad) or 0.0 for part in parts) / known
    return rates


def _log_row(
    sample: Sample, advantage: float, row_advantages: list[float], step: int, format: Format
) -> dict[str, Any]:
    trajectory = sample.trajectory
    reading = format.read(trajectory) if trajectory else None
    return {
        "step": step,
        "dataset": sample.question.dataset,
        "question_id": sample.question.id,
        "sample": sample.index,
        "reward": sample.score.value,
        "advantage": advantage,
        "row_advantages": row_advantages,
        "cause": sample.score.cause,
        "parts": sorted((name, value) for name, value in sample.score.parts.items()),
        "well_formed": reading.well_formed if reading else None,
        "reason": reading.reason if reading else "",
        "answer": trajectory.answer if trajectory else None,
        "stop_reason": trajectory.stop_reason.value if trajectory and trajectory.stop_reason else None,
        "question": sample.question.question,
        "golden_answers": list(sample.question.golden_answers),
        "turn": trajectory_text(trajectory) if trajectory else "",
        "tokens": sum(len(row.completion_ids) for row in sample.transcripts),
        "policy_tokens": sample.policy_tokens,
        "truncated": sample.truncated,
    }
