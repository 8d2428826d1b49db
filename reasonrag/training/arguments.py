"""From our settings to the configuration of TRL's trainers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.secrets import redact
from reasonrag.core.settings import nearest
from reasonrag.core.text import one_line
from reasonrag.training.settings import TrainSettings

_INIT = "model_init_kwargs"
# Arguments of TRL that are fixed here, with the reason.
_FIXED = {
    "output_dir": "it is given by --out",
    "max_length": "set it outside of trainer; longer examples are left out, never cut",
    "save_total_limit": "set it outside of trainer",
    "warmup_steps": "set warmup_ratio outside of trainer",
    "warmup_ratio": "set it outside of trainer",
    "use_cpu": "set device to cpu",
    "resume_from_checkpoint": "the same command goes on from the last checkpoint by itself",
    "push_to_hub": "upload the finished folder instead",
    "hub_token": "settings are written down; log in to the Hub instead",
    "padding_free": "TRL's DPO has none, and steps are kept apart",
    "packing": "steps are kept apart",
}


def on_gpu(settings: TrainSettings) -> bool:
    """Whether the training runs on a GPU."""
    import torch

    return settings.device != "cpu" and bool(torch.cuda.is_available())


def trainer_arguments(kind: Any, settings: TrainSettings, out: Path, *, own: Mapping[str, Any]) -> Any:
    """TRL's configuration. Making it joins the process group where a launcher has started several processes.

    Args:
        kind: `DPOConfig`, `SFTConfig` or `GRPOConfig`.
        settings: ours; `settings.trainer` is laid over what follows from the rest.
        out: the training's folder.
        own: arguments that only this kind has, and that follow from settings.

    Raises:
        ConfigError: an unknown argument (with the nearest name), one that has its own setting, or a value that TRL
            refuses.
    """
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    values = {name: value for name, value in _from_settings(settings, out).items() if name in known} | dict(own)
    for name in settings.trainer:
        if name in _FIXED:
            raise ConfigError(f"trainer.{name} cannot be set: {_FIXED[name]}")
        if name in own or name in type(settings).model_fields:
            raise ConfigError(f"trainer.{name} has a setting of its own; set {name} outside of trainer")
        if name not in known:
            raise ConfigError(f"trainer.{name} is unknown to {kind.__name__}{_nearest(name, known)}")
    values |= {name: value for name, value in settings.trainer.items() if name != _INIT}
    try:
        with warnings.catch_warnings():  # names that are on their way out, still needed by the older versions we take
            warnings.simplefilter("ignore", FutureWarning)
            return kind(**values)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"TRL refuses these settings: {one_line(redact(str(error)))[:300]}") from error


def model_init(settings: TrainSettings) -> dict[str, Any]:
    """Arguments of `from_pretrained` that are set through `trainer.model_init_kwargs`, such as attn_implementation."""
    return dict(settings.trainer.get(_INIT) or {})


def _nearest(name: str, known: set[str]) -> str:
    hint = nearest(name, sorted(known))
    return hint if "did you mean" in hint else "; see TRL's documentation for its arguments"


def _from_settings(settings: TrainSettings, out: Path) -> dict[str, Any]:
    gpu = on_gpu(settings)
    checkpointing = settings.gradient_checkpointing
    same = [
        "seed",
        "lr_scheduler_type",
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "weight_decay",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "logging_steps",
        "save_steps",
        "eval_steps",
        "trust_remote_code",
    ]
    return {
        **{name: getattr(settings, name) for name in same if name in type(settings).model_fields},
        "output_dir": str(out / "checkpoints"),
        # transformers 5 has no warmup_ratio: a number of steps below 1 is the share.
        "warmup_steps": settings.warmup_ratio,
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        "eval_strategy": "steps" if "eval_steps" in type(settings).model_fields else "no",
        "save_strategy": "steps",
        "save_total_limit": None,  # older checkpoints go only once the new one is whole, see `watch`
        "max_length": None,
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu if checkpointing is None else checkpointing,
        "dataloader_pin_memory": gpu,
        "report_to": list(settings.report_to) or "none",
        "disable_tqdm": True,
        "log_level_replica": "error",
        "logging_nan_inf_filter": False,  # it would put an average in place of a loss that is not a number
        "include_num_input_tokens_seen": "non_padding",
    }
