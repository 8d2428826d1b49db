"""The model that a training run starts from: a folder, a Hub id, the shipped policy, or a LoRA adapter of one of them.

An adapter can be merged into its model afterwards.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.config import ModelConfig, copy_card
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.llm.chat_template import (
    ChatTemplate,
    check_chat_template,
    check_folder,
    load_causal,
    loading,
    template_identity,
)
from reasonrag.llm.model_folder import adapter_base, model_identity, public_name, require_memory
from reasonrag.training.settings import LoraSettings, TrainSettings

MODEL_INIT = "model_init_kwargs"  # of settings.trainer: more arguments of `from_pretrained`
LENGTH = "length"  # column of a data set: the tokens of a row alone in its batch
HUB_MODEL = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is: its path and that of its weights are folders or Hub ids."""

    path: str
    base: str  # of the weights; differs from `path` if that is an adapter
    revision: str | None
    name: str  # for people, without a path
    checksum: str  # the folder's name with a checksum, or the Hub id with its revision
    chat_template: str | None = None  # instead of the model's own

    @property
    def is_adapter(self) -> bool:
        return self.path != self.base

    def chat(self) -> ChatTemplate:
        """Load the tokenizer with its chat template; an adapter without a tokenizer has its model's.

        Raises:
            ConfigError: the model is missing, or has no chat template.
        """
        path = tokenizer_path(self.path, self.base)
        return ChatTemplate.load(path, revision=self.revision, template=self.chat_template)

    def context(self) -> int | None:
        """Return the number of positions that the model was made for; None if its configuration has no such entry."""
        from transformers import AutoConfig

        with loading(self.base):
            revision = None if self.is_adapter else self.revision
            config = AutoConfig.from_pretrained(self.base, revision=revision)
        return getattr(config.get_text_config(), "max_position_embeddings", None)


def model_path(model: str) -> str:
    """Return what transformers loads for a model's name: `demo` and `demo:FORMAT` are folders of shipped policies.

    Raises:
        ConfigError: no shipped policy uses that format.
    """
    return ModelAddress.of_model(model).model


def acting_policy(policy: ModelConfig) -> tuple[str | None, bool]:
    """Return the model that acted in a run, as `--model` takes it, and whether it may have run without a GPU.

    The model is None if nothing that could be trained acted there.
    """
    address = policy.address
    if address.is_server and policy.model and HUB_MODEL.fullmatch(policy.model):
        return policy.model, False
    if address.backend is None or not address.backend.trainable:
        return None, False
    return address.rest if address.loads_weights else policy.spec, not address.backend.needs_gpu


def open_source(settings: TrainSettings) -> ModelSource:
    """Find the model of the settings.

    Raises:
        ConfigError: none is named, its folder is missing, or its adapter cannot be read or trained.
    """
    if settings.model is None:
        raise ConfigError("no model to train is named; add --model with a folder, a Hub id, or demo")
    path = model_path(settings.model)
    check_folder(path)
    if Path(path).is_dir():  # an adapter names its model's folder, also to who works in another one
        path = str(Path(path).absolute())
    base = adapter_base(Path(path))
    if base is not None and settings.method == "full":
        raise ConfigError(
            f"{settings.model} is a LoRA adapter, which has no full weights to train; "
            "merge it first, or take --method lora to train it further"
        )
    revision, template = settings.revision, settings.chat_template
    check_chat_template(tokenizer_path(path, base or path), template)
    checksum = model_identity(path, revision) + template_identity(template)
    return ModelSource(path, base or path, revision, public_name(path), checksum, template)


def tokenizer_path(path: str, base: str) -> str:
    """Return the path of a model's tokenizer: that of its adapter, or of the model below that."""
    return path if path == base or (Path(path) / "tokenizer_config.json").is_file() else base


def stop_at_end_of_turn(model: Any, chat: ChatTemplate) -> None:
    """Let generation stop at the end of a turn too: of Gemma, `eos_token_id` becomes `[1, 106]`."""
    configured = model.generation_config.eos_token_id
    end_ids = configured if isinstance(configured, list) else [configured]
    if chat.end_of_turn not in end_ids:
        model.generation_config.eos_token_id = [*(token for token in end_ids if token is not None), chat.end_of_turn]


def uses_gpu(settings: TrainSettings) -> bool:
    """Return whether the training run uses a GPU.

    Raises:
        ConfigError: it is asked for Apple's, which is not here.
    """
    import torch

    if settings.device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps is the GPU of an Apple computer, and torch finds none here; leave device out")
    return settings.device == "mps" or (settings.device == "auto" and bool(torch.cuda.is_available()))


def load_weights(source: ModelSource, settings: TrainSettings) -> Any:
    """Load the model; an adapter is loaded on top of its model, and stays trainable.

    Raises:
        ConfigError: transformers or peft refuse it.
    """
    import torch

    # Full training updates the weights themselves, and at the usual learning
    # rates an update is too small for bfloat16 to represent: so it is float32
    # unless asked otherwise (on a GPU the arithmetic is in bfloat16 anyway).
    dtype = settings.dtype or ("bfloat16" if settings.method == "lora" and uses_gpu(settings) else "float32")
    options = {
        "revision": None if source.is_adapter else source.revision,
        "dtype": getattr(torch, dtype),
        **(settings.trainer.get(MODEL_INIT) or {}),
    }
    if not uses_gpu(settings):
        # All weights, their gradients and AdamW's two means. An adapter's are small.
        copies = 4 if settings.method == "full" else 1
        remedy = "a smaller model, --method lora, or a machine with more memory"
        require_memory(source.base, dtype, copies=copies, revision=options["revision"], remedy=remedy)
    model = load_causal(source.base, **options)
    if not source.is_adapter:
        return model
    from peft import PeftModel

    with loading(source.path):
        return PeftModel.from_pretrained(model, source.path, is_trainable=True)


def lora_config(settings: LoraSettings, *, revision: str | None = None) -> Any:
    """Return peft's configuration. The model's `revision` is noted in it, so that merging loads the same one."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.r, lora_alpha=settings.alpha, target_modules="all-linear", task_type="CAUSAL_LM", revision=revision
    )


def merge_adapter(folder: Path, out: Path, *, chat: ChatTemplate) -> None:
    """Merge a LoRA adapter into its model, as a folder that transformers loads without peft.

    The sum is computed in float32 and rounded once, to the dtype of the model's own files. `out` appears
    once it is complete, with `reasonrag.yaml` and the tokenizer.
    """
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig

    base = adapter_base(folder)
    assert base is not None
    with loading(base):
        options = {"revision": PeftConfig.from_pretrained(str(folder)).revision}
        dtype = getattr(AutoConfig.from_pretrained(base, **options), "dtype", None) or torch.float32
        model = load_causal(base, **{**options, "dtype": torch.float32})
        stop_at_end_of_turn(model, chat)
        generation_config = model.generation_config
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True).to(dtype)
    merged.config.dtype = dtype
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    merged.save_pretrained(temporary)
    generation_config.save_pretrained(temporary)
    chat.tokenizer.save_pretrained(temporary)
    if not copy_card(folder, temporary):
        copy_card(Path(base), temporary)
    # A folder that exists is complete: it is renamed once everything is in it.
    temporary.replace(out)
