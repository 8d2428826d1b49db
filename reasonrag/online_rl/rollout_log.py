"""The log of each training step: every trajectory with the components of its reward, and the batch's metrics.

OUT/rollouts/step-000007.parquet    one row per trajectory
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.secrets import redact_data
from reasonrag.core.types import Trajectory
from reasonrag.evaluation.metrics import Attempt, attempt_values
from reasonrag.formats import Format
from reasonrag.online_rl.advantages import Baseline, Scale, group_advantages
from reasonrag.online_rl.collector import Batch, Sample
from reasonrag.online_rl.rows import Credit, over_tokens, owners, step_advantages
from reasonrag.rewards.base import trajectory_text
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import rollout_schema

ANSWER_METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced")


def write_rollouts(
    batch: Batch,
    folder: Path,
    *,
    step: int,
    process: int,
    format: Format,
    baseline: Baseline = "group",
    scale: Scale = "group",
    spread: float = 1.0,
    credit: Credit = "trajectory",
    by_row: Sequence[float] = (),
) -> None:
    """Write this process's rollouts for training step `step + 1`; after a restart, a repeated step replaces its file.

    Advantages are those of `group_advantages`, divided by `spread` (see `advantage_scale`); those of the rows follow
    from `credit` (see `rows.training_rows`), and the rewards of steps add their mean over a row's tokens. If each token
    has its own, `by_row` are their means in each row of the batch, and a trajectory has the mean of its rows.
    """
    # TRL computes the same advantages for its loss (tests/online_rl/test_trainer.py compares them). It does so in
    # float32 and after this log is written; these are float64, and a group without variance has exactly 0.
    rows = []
    means = iter(by_row)
    for group in batch.groups:
        compared = group_advantages(group.rewards, baseline=baseline, scale=scale)
        advantages = [advantage / spread for advantage in compared]
        of_steps = step_advantages(group)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            of_rows = []
            for row in sample.transcripts:
                shared = fmean(advantages[owner] for owner in owners(group, sample, row, credit))
                extra = sum(over_tokens(sample, row, of_steps[sample.index])) / max(sum(row.mask), 1)
                of_rows.append(shared + extra)
            if by_row:
                of_rows = [next(means) for _ in of_rows]
                advantage = fmean(of_rows)
            # Secrets are redacted only here: the trainer needs the exact tokens that the policy sampled.
            rows.append(redact_data(_row(sample, advantage, of_rows, step + 1, format), "a rollout"))
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{process}" if process else ""
    write_parquet(folder / f"step-{step + 1:06d}{suffix}.parquet", rows, rollout_schema())


def batch_metrics(batch: Batch, format: Format) -> dict[str, float]:
    """Return means over a batch, by name.

    `rollout/reward` and `reward/PART` are means over the trajectories that have them, `rollout/...` over those that did
    not fail; `unscored/CAUSE` counts the trajectories without a reward.
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


def _row(sample: Sample, advantage: float, row_advantages: list[float], step: int, format: Format) -> dict[str, Any]:
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
