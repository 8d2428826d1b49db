"""What a finished training run shows of itself: the contents of `training.json`, and the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from reasonrag.core.plots import Line, Panel
from reasonrag.storage.files import short_hash
from reasonrag.storage.runs import versions
from reasonrag.training.folder import without_places
from reasonrag.training.model import ModelSource
from reasonrag.training.settings import TrainSettings

# Counted from the start of a process, so wrong after a resume; `num_input_tokens_seen` and `seconds` are of the run.
_OF_A_PROCESS = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "num_tokens")
# Each curve: key in the log, key in the log of held-out metrics (after `eval_`), title, label of the y axis.
_PAIR_CURVES = (
    ("loss", "loss", "loss", "loss"),
    ("rewards/margins", "rewards/margins", "reward margin", "margin"),
    ("rewards/accuracies", "rewards/accuracies", "reward accuracy", "accuracy"),
    ("mean_token_accuracy", "mean_token_accuracy", "token accuracy", "accuracy"),
)
_ROLLOUT_CURVES = (
    ("rollout/reward", "reward", "reward", "reward"),
    ("rollout/em", "em", "exact match", "EM"),
    ("rollout/retrievals", "retrievals", "retrievals a question", "retrievals"),
    ("rollout/format_rate", "format_rate", "well-formed trajectories", "share"),
    ("rollout/osr", "osr", "over-search rate", "OSR"),
    ("rollout/usr", "usr", "under-search rate", "USR"),
    ("entropy", "entropy", "entropy", "nats a token"),
    ("rollout/tokens", "tokens", "length", "policy's tokens"),
)


def summarise(
    state: Any,
    *,
    stage: str,
    settings: TrainSettings,
    source: ModelSource,
    data: Mapping[str, Any],
    described: Mapping[str, Any],
    seconds: float,
    device: str,
    processes: int,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `training.json` holds: no path of this machine, no secret, no NaN.

    `state` is transformers' `TrainerState` after the last step, `data` the data's entry (source, checksum, counts,
    lengths), `described` comes from `folder.describe`, and `seconds` includes earlier processes. `more` is what this
    kind of training run adds.
    """
    history = [_of_run(entry) for entry in state.log_history]
    train = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if "eval_loss" in entry or "eval_em" in entry]
    with_loss = [entry for entry in held_out if entry.get("eval_loss") is not None]
    best = min(with_loss, key=lambda entry: float(entry["eval_loss"]), default=None)
    return {
        "stage": stage,
        "name": short_hash(described),
        "model": {"name": source.name, "checksum": source.checksum},
        "data": dict(data),
        "steps": state.global_step,
        "epochs": state.epoch,
        "seconds": round(seconds, 2),
        "tokens_seen": int(state.num_input_tokens_seen),
        "final": {"train": train[-1] if train else None, "held_out": held_out[-1] if held_out else None},
        "best_held_out": best,
        **more,
        "device": device,
        "processes": processes,
        "settings": without_places(settings.model_dump(mode="json")),
        "identity": dict(described),
        "versions": versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
        "history": history,
    }


def panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each metric of the log, by step, in training and on held-out questions.

    Online training also gets one with the components of the reward, and one of held-out EM by seconds.
    """
    is_online = any("rollout/em" in entry for entry in history)
    is_dpo = any("rewards/margins" in entry for entry in history)
    curves, trained_label = (_ROLLOUT_CURVES, "rollouts") if is_online else (_PAIR_CURVES, "train")
    drawn = []
    for key, held_out_key, title, y_label in curves:
        if is_dpo and key == "mean_token_accuracy":
            continue
        if lines := _lines(history, {trained_label: key, "held-out": f"eval_{held_out_key}"}):
            drawn.append(Panel(title, "step", y_label, lines))
    if is_online:
        components = sorted({key for entry in history for key in entry if key.startswith("reward/")})
        if lines := _lines(history, {key.removeprefix("reward/"): key for key in components}):
            drawn.append(Panel("components of the reward", "step", "mean", lines))
        if lines := _lines(history, {"held-out": "eval_em"}, x="seconds"):
            drawn.append(Panel("exact match by time", "seconds", "EM", lines))
    return drawn or [Panel("loss", "step", "loss", ())]


def _lines(history: Sequence[Mapping[str, Any]], keys: Mapping[str, str], *, x: str = "step") -> tuple[Line, ...]:
    """Return a line for each key of the log that has any value; `keys` are by label, `x` is another key."""
    lines = []
    for label, key in keys.items():
        entries = [entry for entry in history if entry.get(key) is not None and x in entry]
        if entries:
            lines.append(Line(label, [float(e[x]) for e in entries], [float(e[key]) for e in entries]))
    return tuple(lines)


def _of_run(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an entry of the log says about the training run, without NaN."""
    kept = {name: value for name, value in entry.items() if name.removeprefix("eval_") not in _OF_A_PROCESS}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in kept.items()}
