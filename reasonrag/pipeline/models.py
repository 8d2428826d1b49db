"""Open the models of `--policy` and `--judge`; their addresses are checked first, and their servers asked."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import structlog

from reasonrag.core import event_loop
from reasonrag.core.config import Config, ModelConfig, carried_settings
from reasonrag.core.errors import BackendError, ConfigError
from reasonrag.core.models import PAPER_POLICY, ModelAddress, choices
from reasonrag.core.settings import COMMIT, Tree, merge, validate
from reasonrag.llm.base import LLM
from reasonrag.llm.chat_template import check_chat_template
from reasonrag.llm.machine import size_if_large
from reasonrag.llm.model_folder import adapter_base
from reasonrag.llm.openai_wire import ServedModel
from reasonrag.rollout import callable_in_notebooks
from reasonrag.storage.folder import RunFolder

if TYPE_CHECKING:
    pass

log = structlog.get_logger()

Role = Literal["policy", "judge"]

_POLL_S = 1.0  # between two questions to a server that does not answer yet
_LEARNT = ("model", "vllm", "card")  # settings that a server supplies


def open_llm(config: ModelConfig, role: Role, *, beside: LLM | None = None) -> LLM:
    """Open the model that the configuration names; without a name, the paper's if this machine has a GPU.

    At a server that the model `beside` is on too, both share the requests in flight, unless this one has a number of
    its own.

    Raises:
        ConfigError: no model is named on a machine without a GPU, the address is unknown, or it cannot work here.
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
        ConfigError: the model cannot work here; one line names the reason.
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
    """Return the result of a part's `check`; repeat it for `wait_s` seconds while its server does not answer yet.

    Raises:
        LLMError, RetrievalError, ConfigError: as `check` does.
    """
    ends_at, is_waiting = time.monotonic() + wait_s, False
    while True:
        try:
            return await part.check()
        except BackendError as error:
            if error.cause != "unreachable" or time.monotonic() + _POLL_S > ends_at:
                raise
            if not is_waiting:
                log.warning(f"{error}; waiting up to {wait_s:g} s")
                is_waiting = True
        await asyncio.sleep(_POLL_S)


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


@callable_in_notebooks
def as_served(config: Config, out: Path | None = None) -> Config:
    """Return a configuration with the name, kind and card of the models on the servers of its policy and its judge.

    Explicit settings stay. A run that has begun in `out` goes on with the values that it began with.

    Raises:
        ConfigError: a server or a context cannot serve this run; one line names the remedy.
        LLMError: a server does not answer, or refuses the key.
    """
    roles: list[Role] = [role for role in ("policy", "judge") if config.model_of(role).address.is_server]
    if not roles:
        return config
    before = RunFolder.begun_with(out) if out else {}
    if not all(before.get(role, {}).get("model") for role in roles):
        return event_loop.run(_asked(config, roles))
    for role in roles:
        config = _with(config, role, {name: before[role][name] for name in _LEARNT if name in before[role]})
    return config


async def _asked(config: Config, roles: list[Role]) -> Config:
    for role in roles:
        model = config.model_of(role)
        check_llm(model, role)
        from reasonrag.llm.server import open_server  # imports aiohttp

        async with aclosing(open_server(model.address, model)) as llm:
            if served := await once_up(llm, config.run.wait_s):
                learnt = {"model": served.name} | ({"vllm": True} if served.is_vllm else {})
                if role == "policy" and not model.card and carried_settings(ModelAddress("hf", served.root)):
                    learnt["card"] = served.root
                config = _with(config, role, learnt)
                _check_context(served, config, role)
                if learnt.keys() - model.model_fields_set:
                    is_vllm = ", which is vLLM" if served.is_vllm else ""
                    asked = f"; it is asked as {learnt['card']}/reasonrag.yaml says" if "card" in learnt else ""
                    log.info(f"the {role} at {model.spec} is {served.name}{is_vllm}{asked}")
    return config


def _with(config: Config, role: Role, learnt: Tree) -> Config:
    """Return a configuration with settings of a model, and of its card, except for settings that it has already."""
    tree = carried_settings(ModelAddress("hf", learnt["card"])) if learnt.get("card") else {}
    merge(tree, {role: learnt})
    merge(tree, config.model_dump(exclude_unset=True))
    return validate(Config, tree)


def _check_context(served: ServedModel, config: Config, role: Role) -> None:
    """Raise if a step alone fills the context."""
    most = config.model_of(role).max_tokens
    if served.context is not None and most >= served.context:
        raise ConfigError(
            f"{served.name} has a context of {served.context} tokens, too few for {role}.max_tokens {most}: lower it, "
            "or start the server with a longer one (vllm serve --max-model-len)"
        )
