"""What servers say of their models before a run: the name, whether it is vLLM, the context, the folder of the card."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import structlog

from reasonrag.core import event_loop
from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.settings import Tree, carried_settings, merge, validate
from reasonrag.core.types import Question
from reasonrag.formats import open_format
from reasonrag.llm.openai_wire import ServedModel
from reasonrag.llm.server import ServerLLM, open_server
from reasonrag.pipeline.models import Role, check_llm, once_up
from reasonrag.rollout import callable_in_notebooks
from reasonrag.storage.runs import RunFolder

log = structlog.get_logger()

_LEARNT = ("model", "vllm", "card")


@callable_in_notebooks
def as_served(config: Config, out: Path | None = None) -> Config:
    """Return a configuration with what the servers of its policy and its judge say of their models.

    What is set stays. A run of servers that has begun in `out` goes on with what it began with; none is asked.

    Raises:
        ConfigError: a server or a context cannot serve this run; one line says what to do.
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
        async with aclosing(open_server(model.address, model)) as llm:
            if served := await once_up(llm, config.run.wait_s):
                learnt = {"model": served.name} | ({"vllm": True} if served.is_vllm else {})
                if role == "policy" and not model.card and carried_settings(ModelAddress("hf", served.root)):
                    learnt["card"] = served.root
                config = _with(config, role, learnt)
                await _check_context(llm, served, config, role)
                if learnt.keys() - model.model_fields_set:
                    is_vllm = ", which is vLLM" if served.is_vllm else ""
                    asked = f"; it is asked as {learnt['card']}/reasonrag.yaml says" if "card" in learnt else ""
                    log.info(f"the {role} at {model.spec} is {served.name}{is_vllm}{asked}")
    return config


def _with(config: Config, role: Role, learnt: Tree) -> Config:
    """Return a configuration with settings of a model, and those of its card, below what it sets."""
    tree = carried_settings(ModelAddress("hf", learnt["card"])) if learnt.get("card") else {}
    merge(tree, {role: learnt})
    merge(tree, config.model_dump(exclude_unset=True))
    return validate(Config, tree)


async def _check_context(llm: ServerLLM, served: ServedModel, config: Config, role: Role) -> None:
    """Raise if not even the first prompt leaves room for a step."""
    if served.context is None:
        return
    written, read = config.model_of(role).max_tokens, 0
    if role == "policy":
        read = await llm.prompt_tokens(open_format(config, warn=False).prompt(Question("", "", ()), ()))
    if read + written > served.context:
        raise ConfigError(
            f"{served.name} has a context of {served.context} tokens, too few for {role}.max_tokens {written}"
            f"{f' and a prompt of {read} or more' if read else ''}: lower it, or start the server with a longer one "
            "(vllm serve --max-model-len)"
        )
