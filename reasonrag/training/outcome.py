"""What the end of every training writes: `training.json`, curves, the policy's card, the merged model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.plots import Line, Panel, save_panels
from reasonrag.core.policy_card import PolicyCard, copy_card
from reasonrag.llm.chat_template import ChatTemplate, cannot_load, check_folder
from reasonrag.llm.model_folder import adapter_base
from reasonrag.storage.files import write_json
from reasonrag.storage.runs import versions
from reasonrag.training.checkpoints import last_checkpoint
from reasonrag.training.folder import SUMMARY, digest, without_places
from reasonrag.training.model import ModelSource
from reasonrag.training.settings import TrainSettings

__all__ = ["MERGED", "TrainingOutcome", "finish", "last_checkpoint", "merge_adapter", "panels"]

MERGED = "merged"
_NAMES = ("peft", "accelerate")
_CURVES = (
    ("loss", "loss", "loss"),
    ("rewards/margins", "reward margin", "margin"),
    ("rewards/accuracies", "reward accuracy", "accuracy"),
    ("mean_token_accuracy", "token accuracy", "accuracy"),
)
# Of online training: in rollouts, and held out.
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


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """A training that has come to its end.

    Attributes:
        data: what is to be said of the data: source, checksum, counts, lengths.
        card: for `reasonrag.yaml`, None where the data's run is not known.
        described: see `folder.describe`.
        state: transformers' `TrainerState`.
        seconds: of the whole training, those before a kill included.
        device: in words.
        processes: that took part.
        more: what this kind of training adds to `training.json`.
    """

    stage: str
    settings: TrainSettings
    source: ModelSource
    data: Mapping[str, Any]
    card: PolicyCard | None
    described: Mapping[str, Any]
    state: Any
    seconds: float
    device: str
    processes: int
    more: Mapping[str, Any]


def finish(out: Path, outcome: TrainingOutcome) -> dict[str, Any]:
    """Write everything but the model itself, `training.json` last; returns what that holds."""
    for name in ("training_args.bin", "README.md"):  # a pickle, and peft's empty card: both with this machine's paths
        (out / name).unlink(missing_ok=True)
    save_panels(out / "curves", panels(outcome.state.log_history))
    write_card(out, outcome.card, outcome.source)
    if outcome.settings.merge and outcome.settings.method == "lora":
        merge_adapter(out, out / MERGED, trust_remote_code=outcome.settings.trust_remote_code)
    summary = summarise(outcome)
    write_json(out / SUMMARY, summary)
    return summary


def summarise(outcome: TrainingOutcome) -> dict[str, Any]:
    """What `training.json` holds: no path of this machine, no secret, nothing that JSON cannot say."""
    state = outcome.state
    history = [_finite(entry) for entry in state.log_history]
    train = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if "eval_loss" in entry or "eval_em" in entry]
    losses = [entry for entry in held_out if entry.get("eval_loss") is not None]
    best = min(losses, key=lambda entry: float(entry["eval_loss"]), default=None)
    return {
        "stage": outcome.stage,
        "name": digest(outcome.described),
        "model": {"name": outcome.source.name, "checksum": outcome.source.checksum},
        "data": dict(outcome.data),
        "steps": state.global_step,
        "epochs": state.epoch,
        "seconds": round(outcome.seconds, 2),
        "tokens_seen": int(state.num_input_tokens_seen),
        "final": {"train": train[-1] if train else None, "held_out": held_out[-1] if held_out else None},
        "best_held_out": best,
        **outcome.more,
        "device": outcome.device,
        "processes": outcome.processes,
        "settings": without_places(outcome.settings.model_dump(mode="json")),
        "identity": dict(outcome.described),
        "versions": versions() | _more_versions(),
        "history": history,
    }


def panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Loss, margin and accuracy by step, in training and on the held-out questions."""
    if any("rollout/em" in entry for entry in history):
        return _rollout_panels(history)
    is_dpo = any("rewards/margins" in entry for entry in history)
    drawn = []
    for name, title, label in _CURVES:
        if is_dpo and name == "mean_token_accuracy":
            continue
        lines = _lines(history, (("train", name), ("held-out", f"eval_{name}")))
        if lines:
            drawn.append(Panel(title, "step", label, lines))
    return drawn or [Panel("loss", "step", "loss", ())]


def _rollout_panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Of online training, and each component of the reward."""
    drawn = []
    for name, held_out, title, label in _ROLLOUT_CURVES:
        if lines := _lines(history, (("rollouts", name), ("held-out", f"eval_{held_out}"))):
            drawn.append(Panel(title, "step", label, lines))
    components = sorted({key for entry in history for key in entry if key.startswith("reward/")})
    if lines := _lines(history, [(key.removeprefix("reward/"), key) for key in components]):
        drawn.append(Panel("components of the reward", "step", "mean", lines))
    return drawn


def _lines(history: Sequence[Mapping[str, Any]], named: Sequence[tuple[str, str]]) -> tuple[Line, ...]:
    """A curve for each key that is there at all."""
    lines = []
    for shown, key in named:
        points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
        if points:
            lines.append(Line(shown, [float(x) for x, _ in points], [float(y) for _, y in points]))
    return tuple(lines)


def write_card(out: Path, card: PolicyCard | None, source: ModelSource) -> None:
    """That of the data's run, else the one that the model came with, if any."""
    if card is not None:
        card.write(out)
    elif not copy_card(Path(source.path), out):
        copy_card(Path(source.base), out)


def merge_adapter(folder: Path, out: Path, *, trust_remote_code: bool = False) -> Path:
    """Merge a LoRA adapter into its model, as a folder that transformers loads without peft.

    The sum is taken in float32 and rounded once, to the type that the model's own files have.

    Args:
        folder: with the adapter, its tokenizer, and `reasonrag.yaml` if there is one.
        out: to write; it appears when it is whole.
        trust_remote_code: whether to run code that comes with the model.

    Returns:
        `out`.

    Raises:
        ConfigError: there is no adapter, or its model cannot be loaded.
        RunError: `out` is there already.
    """
    base = adapter_base(folder)
    if base is None:
        raise ConfigError(f"{folder} holds no LoRA adapter (adapter_config.json), so there is nothing to merge")
    if out.exists():
        raise RunError(f"{out} is there already; remove it, or choose another folder")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model, generation = _merged(folder, base, trust_remote_code)
    model.save_pretrained(temporary)
    generation.save_pretrained(temporary)
    _tokenizer(folder, base, trust_remote_code).save_pretrained(temporary)
    if not copy_card(folder, temporary):
        copy_card(Path(base), temporary)
    temporary.replace(out)
    return out


def _merged(folder: Path, base: str, trust: bool) -> tuple[Any, Any]:
    """The merged model and the generation defaults that its base came with."""
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    check_folder(base)
    try:
        options = {"revision": PeftConfig.from_pretrained(str(folder)).revision, "trust_remote_code": trust}
        stored = getattr(AutoConfig.from_pretrained(base, **options), "dtype", None) or torch.float32
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True, **options)
        generation = model.generation_config
        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True).to(stored)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise cannot_load(base, error) from error
    model.config.dtype = stored
    return model, generation


def _tokenizer(folder: Path, base: str, trust: bool) -> Any:
    """That of the adapter's folder, else of its model."""
    place = str(folder) if (folder / "tokenizer_config.json").is_file() else base
    return ChatTemplate.load(place, trust_remote_code=trust).tokenizer


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}


def _more_versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in _NAMES}
