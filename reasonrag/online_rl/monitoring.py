"""Checks and logs of online training: metrics of batches, validation, the best policy, signs of a collapse.

OUT/rollouts/step-000007.parquet    one row per trajectory, with the components of its reward
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import structlog

from reasonrag.core.text import redact_data
from reasonrag.core.types import Question, Trajectory
from reasonrag.evaluation.metrics import Attempt, attempt_values
from reasonrag.formats import Format
from reasonrag.llm.base import Sampling
from reasonrag.online_rl.collector import Batch, roll_out
from reasonrag.online_rl.rows import Sample
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.retrieval.base import Retriever
from reasonrag.rewards.base import Reward, trajectory_text
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.files import short_hash
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.questions import questions_fingerprint
from reasonrag.storage.tables import rollout_schema

log = structlog.get_logger()

Metrics = Mapping[str, float | None]

ANSWER_METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced")
WINDOW = 10  # batches that are averaged before they are compared, so that one bad batch is tolerated


def collapse(history: Sequence[Mapping[str, Any]], settings: GuardSettings) -> str:
    """Return why training has to stop, by the metrics that transformers has logged so far; "" if it has not to."""
    form, length = _windows(history, "rollout/format_rate"), _windows(history, "rollout/tokens")
    if form and settings.format_rate_drop and form[-1] < max(form) - settings.format_rate_drop:
        return f"well-formed trajectories fell from {max(form):.2f} to {form[-1]:.2f}"
    if length and settings.max_length_growth and length[-1] > settings.max_length_growth * length[0]:
        return f"trajectories grew from {length[0]:.0f} to {length[-1]:.0f} tokens"
    return ""


def _windows(history: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the means of a metric over each `WINDOW` batches in a row."""
    values = [entry[name] for entry in history if name in entry]
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


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

    async def run(self, step: int, *, process: int = 0, processes: int = 1) -> list[Metrics]:
        """Return the metrics of each question of this process's share, with the reward if it is the metric.

        A question on which the policy's backend fails is left out, and a missing reward is left out of its metrics.
        """

        async def attempt(question: Question) -> Trajectory | None:
            seed = derive_seed(self.seed, "validation", question.dataset, question.id)
            trajectory, _ = await roll_out(self.engine, question, seed)
            return trajectory

        attempts = await gather_all(map(attempt, self.questions[process::processes]))
        finished = [trajectory for trajectory in attempts if trajectory is not None]
        rows = [trajectory_metrics(trajectory, self.engine.format) for trajectory in finished]
        if self.metric == "reward" and finished:
            for row, score in zip(rows, await self.reward.score(finished, step=step), strict=True):
                row["reward"] = score.value
        return list(rows)

    def is_best(self, means: Mapping[str, float], step: int) -> bool:
        """Return whether these metrics are the best so far, and remember them if they are."""
        value = means.get(self.metric)
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def state(self) -> dict[str, Any]:
        """Return the best so far, and a hash of the conditions under which a later value can be compared with it."""
        corpus, temperature = self.engine.retriever.fingerprint, self.engine.sampling.temperature
        compared = short_hash([self.metric, questions_fingerprint(self.questions), corpus, temperature])
        return {"best": self.best, "best_step": self.best_step, "compared": compared}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`, without the best so far if the metric, the questions or the sampling changed."""
        if state.get("compared") == self.state()["compared"]:
            self.best, self.best_step = state["best"], state["best_step"]
        else:
            self.best = self.best_step = None
            log.warning("validation has changed, so the search for the best policy restarts")


def validation_engine(engine: Engine, retriever: Retriever, *, temperature: float) -> Engine:
    """Return an engine with the same policy and another retriever, sampling as in evaluation."""
    held_out_engine = copy.copy(engine)
    held_out_engine.retriever = retriever
    held_out_engine.sampling = Sampling(temperature=temperature, max_tokens=engine.sampling.max_tokens)
    return held_out_engine


def mean_metrics(rows: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the rows that know it.

    >>> mean_metrics([{"em": 1.0, "reward": 0.5}, {"em": 0.0, "reward": None}])
    {'em': 0.5, 'reward': 0.5}
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    return {name: fmean(values[name]) for name in sorted(values)}


def batch_metrics(batch: Batch, format: Format) -> dict[str, float]:
    """Return means over a batch, by name.

    `rollout/reward` and `reward/PART` are means over the trajectories that have them, `rollout/...` over the
    trajectories that did not fail; `unscored/CAUSE` counts the trajectories without a reward.
    """
    samples = batch.samples
    metrics = mean_metrics([_sample_metrics(sample, format) for sample in samples])
    metrics |= over_under([sample.score.parts for sample in samples])
    for cause, count in sorted(batch.unscored.items()):
        metrics[f"unscored/{cause}"] = float(count)
    return metrics | {
        "rollout/unscored": sum(sample.score.value is None for sample in samples) / len(samples),
        "rollout/flat_groups": batch.flat / len(batch.groups),
        "rollout/dropped_groups": float(batch.dropped),
        "rollout/retried": float(batch.retried),
        "rollout/seconds": batch.seconds,
    }


def _sample_metrics(sample: Sample, format: Format) -> Metrics:
    metrics: dict[str, float | None] = {
        "rollout/reward": sample.score.value,
        "rollout/tokens": sample.policy_tokens,
        "rollout/rows": len(sample.transcripts),
        "rollout/truncated": sample.truncated,
    }
    for part, value in sample.score.parts.items():
        metrics[f"reward/{part}"] = value
    if sample.trajectory is not None:
        for name, value in trajectory_metrics(sample.trajectory, format).items():
            metrics[f"rollout/{name}"] = value
    return metrics


def trajectory_metrics(trajectory: Trajectory, format: Format) -> dict[str, float | None]:
    """Return EM, F1, ACC, retrievals, steps, whether the answer was forced, and whether the form is right.

    `search_share` is the share of searches among the steps as the format separates them (arXiv:2510.07794, Fig. 2b).
    """
    known, reading = attempt_values(Attempt(trajectory)), format.read(trajectory)
    metrics: dict[str, float | None] = {name: float(known[name] or 0.0) for name in ANSWER_METRICS}
    metrics["format_rate"] = float(reading.well_formed)
    metrics["search_share"] = len(reading.queries) / max(1, len(reading.blocks))
    return metrics


def over_under(parts: Sequence[Metrics]) -> dict[str, float]:
    """Return OSR and USR of the known steps (arXiv:2510.07794, eq. 2), from the parts of HiPRAG's scores.

    Micro-averages: two trajectories with 1 of 1 and 0 of 3 needless searches give 1/4, not the mean of 1 and 0. A step
    without a readable verdict counts in neither number, and a rate without any known step is left out.
    """
    rates = {}
    for name, suboptimal, total in (("osr", "over", "searches_known"), ("usr", "under", "own_steps_known")):
        known = sum(part.get(total) or 0.0 for part in parts)
        if known:
            rates[f"rollout/{name}"] = sum(part.get(suboptimal) or 0.0 for part in parts) / known
    return rates


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
        row = {"step": step + 1, "advantage": advantage, "row_advantages": of_rows} | _log_row(sample, format)
        # Secrets are redacted only here: the trainer needs the exact tokens that the policy sampled.
        rows.append(redact_data(row, "a rollout"))
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{process}" if process else ""
    write_parquet(folder / f"step-{step + 1:06d}{suffix}.parquet", rows, rollout_schema())


def _log_row(sample: Sample, format: Format) -> dict[str, Any]:
    trajectory = sample.trajectory
    reading = format.read(trajectory) if trajectory else None
    return {
        "dataset": sample.question.dataset,
        "question_id": sample.question.id,
        "sample": sample.index,
        "reward": sample.score.value,
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
