"""Open the models of `--policy` and `--judge`, and check their addresses first."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import structlog

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import BackendError, ConfigError
from reasonrag.core.http import Retries, Unavailable
from reasonrag.core.models import ModelAddress, choices
from reasonrag.core.settings import COMMIT, carried_settings
from reasonrag.llm.base import LLM
from reasonrag.llm.chat_template import check_chat_template
from reasonrag.llm.machine import size_if_large
from reasonrag.llm.model_folder import adapter_base

log = structlog.get_logger()

Role = Literal["policy", "judge"]

PAPER_POLICY = "Qwen/Qwen2.5-7B-Instruct"


def open_llm(config: ModelConfig, role: Role, *, beside: LLM | None = None) -> LLM:
    """Open the model that the configuration names; without a name, the paper's if this machine has a GPU.

    At a server that the model `beside` is on too, both share the requests in flight, unless this one has a number of
    its own.

    Raises:
        ConfigError: no model is named and there is no GPU, the address is unknown, or it cannot work here.
    """
    address = _address(config, role)
    assert address.backend is not None
    if config.spec is None:
        log.info(f"no --{role} is given: taking the paper's", model=str(address))
    if address.is_server and config.model is None:
        from reasonrag.llm.server import NAME_IT

        raise ConfigError(f"{config.spec} needs the name of the model that it serves: {NAME_IT}")
    if address.loads_weights and (size := size_if_large(address.model, config.revision)):
        log.info("loading the model", model=str(address), size=size)
    llm: Any = resolve_name(address.backend.opener)(address, config)
    if address.is_server and config.concurrency is None:
        llm.share_slots(beside)
    return llm  # type: ignore[no-any-return]


def commits(**models: LLM | None) -> dict[str, str]:
    """Return the commits of the models that are from the Hub: `{"policy_commit": ...}`."""
    known = {}
    for role, model in models.items():
        if commit := getattr(model, "commit", None):
            known[f"{role}{COMMIT}"] = commit
    return known


def check_llm(config: ModelConfig, role: Role) -> None:
    """Check a model's address without loading the model: its backend, and the files of a folder.

    Raises:
        ConfigError: the model cannot work here; one line says why.
    """
    address = _address(config, role)
    if config.card and not carried_settings(config.carrier):
        raise ConfigError(f"--card {config.card}: that folder has no reasonrag.yaml; give the one that training wrote")
    if address.loads_weights:
        check_chat_template(address.model, config.chat_template)
        folder = Path(address.model)
        if folder.is_dir() and adapter_base(folder) is None and not (folder / "config.json").is_file():
            begun = "; its training has not finished" if (folder / "checkpoints").is_dir() else ""
            raise ConfigError(
                f"{config.spec}: there is no model in that folder (no config.json, adapter_config.json){begun}"
            )
    elif config.chat_template is not None and config.api != "completions":
        raise ConfigError(
            f"{config.spec}: a chat template is for hf: and vllm: models, and for --set {role}.api=completions; a "
            "server has that of its model, and is started with another one (vllm serve --chat-template FILE)"
        )
    if config.think is not None and (config.api == "completions" or not address.is_server):
        raise ConfigError(
            f"{config.spec}: --set {role}.think is for a server with the chat API, which has the chat template"
        )
    _ = address.folder  # raises if no demo policy speaks the format


async def once_up(part: Any, wait_s: float) -> Any:
    """Return what a part's `check` returns; ask again for `wait_s` seconds while its server does not answer yet.

    Raises:
        LLMError, RetrievalError, ConfigError: as `check` does.
    """
    retries = Retries(deadline_s=wait_s, max_retries=sys.maxsize, wait_s=lambda failures: 1.0)

    async def check() -> Any:
        try:
            return await part.check()
        except BackendError as error:
            if error.cause != "unreachable" or not wait_s:
                raise
            if not retries.failures:
                log.warning(f"{error}; waiting up to {wait_s:g} s")
            raise Unavailable(str(error)) from error

    try:
        return await retries.run_async(check)
    except Unavailable as failure:
        assert failure.__cause__ is not None
        raise failure.__cause__ from None


def _address(config: ModelConfig, role: Role) -> ModelAddress:
    """Return the address of a model, the paper's if none is given; raise ConfigError if it cannot have this role."""
    address = config.address
    if not config.spec:
        if not has_gpu():
            raise ConfigError(
                f"no --{role} is given and there is no GPU for {PAPER_POLICY}; choose one of: {choices(role)}"
            )
        return ModelAddress("vllm" if find_spec("vllm") else "hf", PAPER_POLICY)
    if address.backend is None:
        hint = f"did you mean hf:{config.spec}? Or " if "/" in config.spec and not address.rest else ""
        raise ConfigError(f"--{role} {config.spec!r} names no backend; {hint}choose one of: {choices(role)}")
    if role == "judge" and not address.backend.judges:
        known = " (demo-judge knows the demo world)" if address.scheme == "demo" else ""
        raise ConfigError(
            f"{address.scheme} cannot judge; choose a model with --judge{known}, or value nodes by --value rollout"
        )
    if role == "policy" and not address.backend.acts:
        raise ConfigError(
            f"{address.scheme} only judges steps and cannot act as a policy; "
            "use it as --judge, and --policy demo for the demo world"
        )
    return address


def has_gpu() -> bool:
    """Return whether torch is installed and sees a CUDA device."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
