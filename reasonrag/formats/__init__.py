"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from reasonrag.core.config import Config, carried_fingerprint
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.plugins import make_plugin
from reasonrag.core.settings import named_path
from reasonrag.core.types import Question
from reasonrag.formats.base import Format, PromptSet
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.formats.reasonrag import ReasonRAGFormat
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.stream import SearchP1Format, SearchR1Format, WhenToSearchFormat
from reasonrag.formats.tool_calls import ToolCallsFormat, parser_of
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.storage.inputs import read_calls

log = structlog.get_logger()

# Each is called with a `PromptSet` and how passages are shown: `passage_order`, `max_passage_chars`.
FORMATS: dict[str, Callable[..., Format]] = {
    "reasonrag": ReasonRAGFormat,
    "search_r1": SearchR1Format,
    "hiprag": HiPRAGFormat,
    "search_p1": SearchP1Format,
    "when_to_search": WhenToSearchFormat,
    "tool_calls": ToolCallsFormat,
}


def open_format(config: Config, *, warn: bool = True) -> Format:
    """Create the format `format.name`, with its prompt texts; `warn` if the policy was trained with others.

    Raises:
        ConfigError: the format or the prompt set does not exist.
    """
    name = config.format.name
    options: dict[str, Any] = {"parser": _tool_parser(config)} if name == ToolCallsFormat.name else {}
    if config.format.open_tags:
        if name != ReasonRAGFormat.name:
            raise ConfigError(f"--open-tags is for the steps of format reasonrag; leave it out for {name}")
        options["open_tags"] = True
    options |= _shown(config)
    prompts = PromptSet.find(config.format.prompts)
    if name.startswith("python:"):
        format: Format = make_plugin(name, ("fingerprint", "prompt", "parse"), prompts, **options)
    elif name in FORMATS:
        format = FORMATS[name](prompts, **options)
    else:
        raise ConfigError(f"format {name!r} is unknown; known: {', '.join(FORMATS)}, python:PACKAGE.MODULE:NAME")
    if not isinstance(format, ReasonRAGFormat):
        _refuse_extractive(config)
    if warn:
        check_prompts(config.policy.carrier, format)
    return format


def _refuse_extractive(config: Config) -> None:
    if config.policy.spec == "extractive":
        raise ConfigError(f"the extractive policy reads format reasonrag, not {config.format.name}; take another")


def open_recorded(config: Config, questions: Sequence[Question]) -> RecordedFormat:
    """Create the format of the agent in `search.recording`.

    Raises:
        ConfigError, DataError: the format has another name, or nothing of the recording can be branched.
    """
    if config.format.name != ToolCallsFormat.name or config.search.recording is None:
        raise ConfigError(
            f"a recorded agent calls functions, and the format is {config.format.name}; add "
            f"--set format.name={ToolCallsFormat.name}"
        )
    _refuse_extractive(config)
    calls = read_calls(named_path(config.search.recording))
    named = config.search.search_function, config.search.answer_function
    return RecordedFormat(calls, questions, parser=_tool_parser(config), named=named, **_shown(config))


def _shown(config: Config) -> dict[str, Any]:
    """Return how passages are shown; training and inference have to agree."""
    return config.retrieval.model_dump(include={"passage_order", "max_passage_chars"})


def _tool_parser(config: Config) -> str:
    """Return the parser of the policy's calls: the named one, or that of the chat template that is applied here.

    Raises:
        ConfigError: the template shows no calls that a parser knows.
    """
    policy = config.policy
    model = policy.tokenizer or policy.model if policy.api == "completions" else None
    if policy.address.loads_weights:
        model = policy.address.rest
    if config.format.tool_parser or not model:  # a server's chat API parses the calls itself
        return config.format.tool_parser or "hermes"
    trust, template = policy.trust_remote_code, policy.chat_template
    try:
        chat = ChatTemplate.load(model, revision=policy.revision, trust_remote_code=trust, template=template)
    except ConfigError:  # reported when the policy is opened
        return "hermes"
    if (parser := parser_of(str(chat.tokenizer.chat_template))) is None:
        raise ConfigError(
            f"the chat template of {policy.spec} shows no function calls that are known here; add --chat-template "
            "chatml-tools or llama3-tools, or name a parser with --set format.tool_parser=..."
        )
    return parser


def check_prompts(policy: ModelAddress, format: Format) -> None:
    """Warn if the card in the folder of a model shows that it was trained in another format, or with other prompts."""
    if carried_fingerprint(policy) not in (None, format.fingerprint):
        log.warning(
            "the model was trained in another format, with other prompts, or with passages shown in another way; train "
            "it again, or use what it was trained with (--format, --prompts)",
            policy=policy,
        )


__all__ = ["FORMATS", "Format", "PromptSet", "ReasonRAGFormat", "check_prompts", "open_format", "open_recorded"]
