"""What each step did, on disk and in figures: every trajectory with all that its reward is made of.

OUT/rollouts/step-000007.parquet    one row a trajectory
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.secrets import redact_data
from reasonrag.core.types import Trajectory
from reasonrag.evaluation.metrics import scores
from reasonrag.formats import Format
from reasonrag.online_rl.advantages import Scale, group_advantages
from reasonrag.online_rl.samples import Batch, Sample
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import rollout_schema

SHOWN = ("em", "f1", "acc", "retrievals", "steps", "forced")


def record(
    batch: Batch, folder: Path, *, step: int, process: int, format: Format, scale: Scale = "group", spread: float = 1.0
) -> None:
    """Write the rollouts for training step `step + 1`. Written again where the step is repeated after a restart.

    Args:
        batch: this process's.
        folder: gets a file.
        step: optimizer steps before.
        process: which one this is.
        format: reads the trajectories.
        scale: of the advantages within a group.
        spread: what all of them are divided by besides, where one scale is that of the whole batch.
    """
    rows = []
    for group in batch.groups:
        advantages = group_advantages(group.rewards, scale=scale)
        rows += [
            _row(sample, advantage / spread, step + 1, format)
            for sample, advantage in zip(group.samples, advantages, strict=True)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{process}" if process else ""
    # Secrets go here and not before: the trainer needs the very tokens that the policy sampled, whatever they spell.
    rows = [_without_secrets(row) for row in rows]
    write_parquet(folder / f"step-{step + 1:06d}{suffix}.parquet", rows, rollout_schema())


def figures(batch: Batch, format: Format) -> dict[str, float]:
    """Means over a batch, by name.

    `reward` and `reward/PART` are over the trajectories that have them, `rollout/...` over those that were made;
    `unscored/CAUSE` counts the trajectories without a reward.
    """
    samples = batch.samples
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for part, value in sample.score.parts.items():
            if value is not None:
                found[f"reward/{part}"].append(float(value))
        if sample.trajectory is not None:
            for name, value in summary(sample.trajectory, format).items():
                found[f"rollout/{name}"].append(value)
        found["rollout/tokens"].append(float(sum(sample.transcript.mask)))
        found["rollout/truncated"].append(float(sample.transcript.truncated))
    rates = over_under([sample.score.parts for sample in samples])
    scored = [sample.score.value for sample in samples if sample.score.value is not None]
    return {
        **{name: fmean(values) for name, values in sorted(found.items())},
        **({"rollout/reward": fmean(scored)} if scored else {}),
        **{f"rollout/{name}": rate for name, rate in rates.items()},
        "rollout/unscored": (len(samples) - len(scored)) / len(samples),
        **{f"unscored/{cause}": float(count) for cause, count in sorted(batch.unscored.items())},
        "rollout/flat_groups": batch.flat / len(batch.groups),
        "rollout/dropped_groups": float(batch.dropped),
        "rollout/retried": float(batch.retried),
        "rollout/seconds": batch.seconds,
    }


def summary(trajectory: Trajectory, format: Format) -> dict[str, float]:
    """EM, F1, ACC, retrievals, steps, whether the answer was forced, and whether all of it is in form."""
    known = scores(trajectory)
    return {
        **{name: float(known[name] or 0.0) for name in SHOWN},
        "format_rate": float(format.read(trajectory).well_formed),
    }


def over_under(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """OSR and USR of the steps that were looked at (arXiv:2510.07794, eq. 2), from the parts of HiPRAG's scores."""
    rates = {}
    for name, bad, of in (("osr", "over", "searches"), ("usr", "under", "own_steps")):
        looked_at = [part for part in parts if part.get(bad) is not None and part.get(of) is not None]
        total = sum(part[of] or 0.0 for part in looked_at)
        if total:
            rates[name] = sum(part[bad] or 0.0 for part in looked_at) / total
    return rates


def _without_secrets(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: redact_data(value, "a rollout") if isinstance(value, str) else value for name, value in row.items()}
    return found | {"golden_answers": [redact_data(answer, "a rollout") for answer in row["golden_answers"]]}


def _row(sample: Sample, advantage: float, step: int, format: Format) -> dict[str, Any]:
    trajectory, written = sample.trajectory, sample.transcript
    reading = format.read(trajectory) if trajectory else None
    last = trajectory.steps[-1] if trajectory else None
    return {
        "step": step,
        "dataset": sample.question.dataset,
        "question_id": sample.question.id,
        "sample": sample.index,
        "reward": sample.score.value,
        "advantage": advantage,
        "cause": sample.score.cause,
        "parts": sorted((name, value) for name, value in sample.score.parts.items()),
        "well_formed": reading.well_formed if reading else None,
        "reason": reading.reason if reading else "",
        "answer": trajectory.answer if trajectory else None,
        "stop_reason": trajectory.stop_reason.value if trajectory and trajectory.stop_reason else None,
        "question": sample.question.question,
        "golden_answers": list(sample.question.golden_answers),
        "turn": last.prompt.prefix + last.completion.text if last else "",
        "tokens": len(written.completion_ids),
        "policy_tokens": sum(written.mask),
        "truncated": written.truncated,
    }
