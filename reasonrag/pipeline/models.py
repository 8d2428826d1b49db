"""`--policy` and `--judge`: open the LLM at an address such as `hf:Qwen/Qwen2.5-7B-Instruct`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from reasonrag.core.config import ModelConfig
from reasonrag.core.documents import named_path
from reasonrag.core.errors import BackendError, ConfigError
from reasonrag.core.http import Retries, Unavailable
from reasonrag.core.plugins import make_plugin
from reasonrag.core.settings import COMMIT, carried_settings, demo_folder
from reasonrag.llm.base import LLM
from reasonrag.llm.chat_template import check_chat_template, template_identity
from reasonrag.llm.memory import size_if_large
from reasonrag.llm.model_folder import adapter_base, model_commit, model_identity

if TYPE_CHECKING:
    from reasonrag.llm.server import ServerLLM

log = structlog.get_logger()

Role = Literal["policy", "judge"]

PAPER_POLICY = "Qwen/Qwen2.5-7B-Instruct"
_POLICY_CHOICES = (
    "http://HOST:PORT/v1 (vLLM, SGLang, any OpenAI-compatible server; several with commas), "
    "hf:NAME_OR_PATH (transformers in this process), vllm:NAME_OR_PATH (vLLM in this process), "
    "demo[:FORMAT] (a tiny model for the demo world), "
    "demo-reader[:WORLD_SEED] (a script for the demo world), extractive (no neural network), "
    "python:PACKAGE.MODULE:FACTORY (your own)"
)
CHOICES: dict[Role, str] = {
    "policy": _POLICY_CHOICES,
    "judge": f"{_POLICY_CHOICES}, demo-judge[:WORLD_SEED[:ERROR]] (knows the demo world's answers)",
}


def open_llm(config: ModelConfig, role: Role, *, beside: LLM | None = None) -> LLM:
    """Open the model that the configuration names; without a name, the paper's if this machine has a GPU.

    At a server that the model `beside` is on too, both share the requests in flight, unless this one has a number of
    its own.

    Raises:
        ConfigError: no model is named and there is no GPU, the address is unknown, or it cannot work here.
    """
    spec, scheme, rest = _parsed(config, role)
    if config.spec is None:
        log.info(f"no --{role} is given: taking the paper's", model=spec)
    if scheme in ("hf", "vllm") and (size := size_if_large(_expanded(rest), config.revision)):
        log.info("loading the model", model=spec, size=size)
    llm = BACKENDS[scheme](spec if scheme.startswith("http") else rest, config)
    if config.concurrency is None and scheme.startswith("http"):
        llm.share_slots(beside)  # type: ignore[attr-defined]
    if scheme in ("hf", "vllm"):
        llm.commit = model_commit(_expanded(rest), config.revision)  # type: ignore[attr-defined]
    return llm


def commits(**models: LLM | None) -> dict[str, str]:
    """Return the commits of the models that are from the Hub: `{"policy_commit": ...}`."""
    found = {f"{role}{COMMIT}": getattr(model, "commit", None) for role, model in models.items()}
    return {name: commit for name, commit in found.items() if commit}


def check_llm(config: ModelConfig, role: Role) -> None:
    """Check a model's address without loading the model: its backend, and the files of a folder.

    Raises:
        ConfigError: the model cannot work here; one line says why.
    """
    spec, scheme, rest = _parsed(config, role)
    if config.card and not carried_settings(config.carrier):
        raise ConfigError(f"--card {config.card}: that folder has no reasonrag.yaml; give the one that training wrote")
    if scheme in ("hf", "vllm"):
        name = _expanded(rest)
        check_chat_template(name, config.chat_template)
        folder = Path(name)
        if folder.is_dir() and adapter_base(folder) is None and not (folder / "config.json").is_file():
            begun = "; its training has not finished" if (folder / "checkpoints").is_dir() else ""
            raise ConfigError(f"{spec}: there is no model in that folder (no config.json, adapter_config.json){begun}")
    elif config.chat_template is not None and config.api != "completions":
        raise ConfigError(
            f"{spec}: a chat template is for hf: and vllm: models, and for --set {role}.api=completions; a server has "
            "that of its model, and is started with another one (vllm serve --chat-template FILE)"
        )
    if config.think is not None and (config.api == "completions" or not is_served(config)):
        raise ConfigError(f"{spec}: --set {role}.think is for a server with the chat API, which has the chat template")
    if scheme == "demo":
        demo_folder(rest)


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


def is_served(config: ModelConfig) -> bool:
    """Return whether the model is on a server."""
    return (config.spec or "").lower().startswith(("http:", "https:"))


def _parsed(config: ModelConfig, role: Role) -> tuple[str, str, str]:
    """Return the address, its scheme (a key of `BACKENDS`), and the rest of the address."""
    spec = config.spec
    if not spec:
        if not has_gpu():
            raise ConfigError(
                f"no --{role} is given and there is no GPU for {PAPER_POLICY}; choose one of: {CHOICES[role]}"
            )
        spec = f"{'vllm' if find_spec('vllm') else 'hf'}:{PAPER_POLICY}"
    scheme, _, rest = spec.partition(":")
    scheme = scheme.lower()
    if scheme not in BACKENDS:
        hint = f"did you mean hf:{spec}? Or " if "/" in spec and not rest else ""
        raise ConfigError(f"--{role} {spec!r} names no backend; {hint}choose one of: {CHOICES[role]}")
    if role == "judge" and is_reader(config):
        known = " (demo-judge knows the demo world)" if scheme == "demo" else ""
        raise ConfigError(
            f"{scheme} cannot judge; choose a model with --judge{known}, or value nodes by --value rollout"
        )
    if role == "policy" and scheme == "demo-judge":
        raise ConfigError(
            "demo-judge only judges steps and cannot act as a policy; "
            "use it as --judge, and --policy demo for the demo world"
        )
    return spec, scheme, rest


def is_reader(config: ModelConfig) -> bool:
    """Return whether this is a small model that can only write the format's steps, and so cannot judge."""
    return (config.spec or "").partition(":")[0].lower() in ("extractive", "demo", "demo-reader")


def has_gpu() -> bool:
    """Return whether torch is installed and sees a CUDA device."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _server(url: str, config: ModelConfig) -> LLM:
    if config.model is None:
        from reasonrag.llm.server import NAME_IT

        raise ConfigError(f"{url} needs the name of the model that it serves: {NAME_IT}")
    return open_server(config)


def open_server(config: ModelConfig) -> ServerLLM:
    """Create the client of the server at `config.spec`. Without a model, it is good for its `check` alone."""
    from reasonrag.llm.openai_wire import MOST_TOKENS
    from reasonrag.llm.server import ServerLLM

    encode, vocabulary = None, MOST_TOKENS
    if config.api == "completions" and config.model:
        from reasonrag.llm.chat_template import ChatTemplate

        tokenizer = config.tokenizer or config.model
        chat = ChatTemplate.load(tokenizer, revision=config.revision, template=config.chat_template)
        encode, vocabulary = (chat.token_ids if config.vllm else chat.text), len(chat.tokenizer)
    return ServerLLM(
        (config.spec or "").split(","),
        config.model or "",
        api="completions" if encode else "chat",
        encode=encode,
        vocabulary=vocabulary,
        processed_logprobs=config.processed_logprobs,
        vllm=config.vllm,
        api_key=os.environ.get(config.api_key_env),
        key_env=config.api_key_env,
        timeout_s=config.timeout_s,
        max_retries=config.max_retries,
        patience_s=config.patience_s,
        concurrency=config.concurrency,
        logprobs=config.logprobs,
        seeded=config.seeded,
        think=config.think,
    )


def _transformers(path: str, config: ModelConfig) -> LLM:
    from reasonrag.llm.local import TransformersLLM

    name = _expanded(path)
    llm = TransformersLLM(
        name,
        batch_size=config.batch_size,
        device=config.device,
        dtype=config.dtype,
        name=f"hf:{model_identity(name, config.revision)}{template_identity(config.chat_template)}",
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        chat_template=config.chat_template,
        threads=config.threads,
    )
    llm.slots.limit = config.concurrency or llm.slots.limit
    return llm


def _vllm(path: str, config: ModelConfig) -> LLM:
    from reasonrag.llm.vllm_engine import VLLMEngine

    name = _expanded(path)
    llm = VLLMEngine(
        name,
        name=f"vllm:{model_identity(name, config.revision)}{template_identity(config.chat_template)}",
        revision=config.revision,
        chat_template=config.chat_template,
        engine_args={"dtype": config.dtype or "auto", "trust_remote_code": config.trust_remote_code},
    )
    llm.slots.limit = config.concurrency or llm.slots.limit
    return llm


def _demo(rest: str, config: ModelConfig) -> LLM:
    return _transformers(str(demo_folder(rest)), config.model_copy(update={"device": "cpu", "dtype": "float32"}))


def _demo_judge(rest: str, config: ModelConfig) -> LLM:
    from reasonrag.demo.judge import DemoJudge

    return DemoJudge.from_spec(rest)


def _extractive(rest: str, config: ModelConfig) -> LLM:
    from reasonrag.demo.reader import ExtractiveLLM

    return ExtractiveLLM()


def _demo_reader(rest: str, config: ModelConfig) -> LLM:
    from reasonrag.demo.reader import DemoReader

    if rest and not rest.isdecimal():
        raise ConfigError(f"demo-reader:{rest} is not of the form demo-reader:WORLD_SEED, such as demo-reader:0")
    return DemoReader(int(rest or 0))


BACKENDS: dict[str, Callable[[str, ModelConfig], LLM]] = {
    "http": _server,
    "https": _server,
    "hf": _transformers,
    "vllm": _vllm,
    "demo": _demo,
    "demo-judge": _demo_judge,
    "demo-reader": _demo_reader,
    "extractive": _extractive,
    "python": lambda path, config: make_plugin(path, ("name", "complete", "aclose"), config),
}


def _expanded(path: str) -> str:
    if not path:
        raise ConfigError("hf: and vllm: need a model, such as hf:Qwen/Qwen2.5-7B-Instruct or hf:FOLDER")
    return str(named_path(path)) if path.startswith("~") else path
