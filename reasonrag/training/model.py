"""The model that a training begins with: a folder, a Hub id, the shipped policy, or a LoRA adapter of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.policy_card import demo_folder
from reasonrag.llm.base import public_name
from reasonrag.llm.chat_template import ChatTemplate, cannot_load, check_folder
from reasonrag.llm.model_folder import adapter_base, model_identity
from reasonrag.training.settings import LoraSettings, TrainSettings

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is.

    Attributes:
        path: a folder or a Hub id.
        base: that of the weights; another one than `path` where that is an adapter.
        name: without a path, for people.
        checksum: the folder's name with a checksum, or the Hub id with its revision.
    """

    path: str
    base: str
    revision: str | None
    trust_remote_code: bool
    name: str
    checksum: str

    @property
    def is_adapter(self) -> bool:
        """Whether there is a LoRA adapter in `path`."""
        return self.path != self.base

    def chat(self) -> ChatTemplate:
        """The tokenizer with its chat template.

        Raises:
            ConfigError: there is no such model, or it has no chat template.
        """
        own = (Path(self.path) / "tokenizer_config.json").is_file()
        path = self.path if own or not self.is_adapter else self.base
        return ChatTemplate.load(path, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def context(self) -> int | None:
        """Positions that the model was made for; None where its configuration names none."""
        from transformers import AutoConfig

        check_folder(self.base)
        try:
            revision = None if self.is_adapter else self.revision
            config = AutoConfig.from_pretrained(self.base, revision=revision, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise cannot_load(self.base, error) from error
        return getattr(config.get_text_config(), "max_position_embeddings", None)


def model_path(model: str) -> str:
    """What transformers loads for a model's name: `demo` and `demo:FORMAT` are the folders of the shipped policies.

    Raises:
        ConfigError: no shipped policy speaks that format.
    """
    scheme, _, format = model.partition(":")
    if scheme == "demo":
        return str(demo_folder(format))
    return str(Path(model).expanduser()) if model.startswith("~") else model


def open_source(settings: TrainSettings) -> ModelSource:
    """Where the model of some settings is.

    Raises:
        ConfigError: none is named, the folder is not there, or its adapter cannot be read or trained.
    """
    if settings.model is None:
        raise ConfigError("no model to train is named; add --model with a folder, a Hub id, or demo")
    path = model_path(settings.model)
    check_folder(path)
    base = adapter_base(Path(path))
    if base is not None and settings.method == "full":
        raise ConfigError(
            f"{settings.model} is a LoRA adapter, which has no weights of its own for full training; "
            "merge it first, or take --method lora to train it further"
        )
    checksum = model_identity(path, settings.revision)
    return ModelSource(path, base or path, settings.revision, settings.trust_remote_code, public_name(path), checksum)


def weight_dtype(settings: TrainSettings, *, gpu: bool) -> str:
    """The type that weights are kept in.

    In full training steps are taken on the weights themselves: at the usual learning rates they are far below what
    bfloat16 can add to a weight, so it is float32 unless asked otherwise (computing is in bfloat16 on a GPU anyway).
    """
    dtype = settings.dtype or ("bfloat16" if gpu and settings.method == "lora" else "float32")
    if dtype not in _DTYPES:
        raise ConfigError(f"{dtype!r} is no dtype of weights; use one of: {', '.join(_DTYPES)}")
    return dtype


def load_weights(source: ModelSource, *, dtype: str, init: Mapping[str, Any] | None = None) -> Any:
    """The model; with its adapter, still trainable, if it is one.

    Args:
        source: where it is.
        dtype: of the weights, see `weight_dtype`.
        init: more arguments of `from_pretrained`.

    Raises:
        ConfigError: transformers or peft refuse it.
    """
    model = _load_base(source, dtype=dtype, init=init or {})
    if not source.is_adapter:
        return model
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, source.path, is_trainable=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise cannot_load(source.path, error) from error


def lora_config(settings: LoraSettings, *, revision: str | None = None) -> Any:
    """What peft calls these settings. `revision` of the model is noted, so that merging loads the same one."""
    from peft import LoraConfig

    modules = settings.target_modules
    if not isinstance(modules, str):
        modules = modules[0] if list(modules) == ["all-linear"] else modules
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
        revision=revision,
    )


def _load_base(source: ModelSource, *, dtype: str, init: Mapping[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    check_folder(source.base)
    options = {
        "revision": None if source.is_adapter else source.revision,
        "trust_remote_code": source.trust_remote_code,
        "dtype": getattr(torch, dtype),
        "use_safetensors": True,
    }
    try:
        return AutoModelForCausalLM.from_pretrained(source.base, **(options | dict(init)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, ImportError) as error:
        raise cannot_load(source.base, error) from error
