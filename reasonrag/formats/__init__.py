"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from reasonrag.core.config import Config, carried_fingerprint
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.plugins import make_plugin
from reasonrag.core.settings import CHAT_TEMPLATES, WITH_TOOLS, named_path
from reasonrag.core.types import Question
from reasonrag.formats.base import Block, Format, PromptSet, Reading, Stage
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.formats.reasonrag import ReasonRAGFormat
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.search_p1 import SearchP1Format
from reasonrag.formats.search_r1 import R1SearcherFormat, ReActFormat, SearchR1Format
from reasonrag.formats.stream import StreamFormat
from reasonrag.formats.tool_calls import ToolCallsFormat, parser_of
from reasonrag.formats.when_to_search import WhenToSearchFormat
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.storage.records import read_calls

log = structlog.get_logger()

# Each is called with a `PromptSet` and how passages are shown: `passage_order`, `max_passage_chars`.
FORMATS: dict[str, Callable[..., Format]] = {
    format.name: format
    for format in (
        *(ReasonRAGFormat, SearchR1Format, HiPRAGFormat, SearchP1Format, WhenToSearchFormat),
        *(ToolCallsFormat, R1SearcherFormat, ReActFormat),
    )
}


def open_format(config: Config, *, warn: bool = True) -> Format:
    """Create the format `format.name`, with its prompt texts; `warn` if the policy was trained with others.

    Raises:
        ConfigError: the format or the prompt set does not exist.
    """
    name = config.format.name
    make: Callable[..., Format]
    if name.startswith("python:"):
        make = partial(make_plugin, name, ("fingerprint", "prompt", "parse"))
    elif name in FORMATS:
        make = FORMATS[name]
    else:
        raise ConfigError(f"format {name!r} is unknown; known: {', '.join(FORMATS)}, python:PACKAGE.MODULE:NAME")
    options: dict[str, Any] = {"parser": _tool_parser(config)} if name == ToolCallsFormat.name else {}
    format: Format = make(
        PromptSet.find(config.format.prompts),
        passage_order=config.retrieval.passage_order,
        max_passage_chars=config.retrieval.max_passage_chars,
        **options,
    )
    if warn:
        check_prompts(config.policy.carrier, format)
    return format


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
    return RecordedFormat(
        read_calls(named_path(config.search.recording)),
        questions,
        parser=_tool_parser(config),
        passage_order=config.retrieval.passage_order,
        max_passage_chars=config.retrieval.max_passage_chars,
    )


def _tool_parser(config: Config) -> str:
    """Return the parser of the policy's calls: the named one, or that of the chat template that is applied here.

    Raises:
        ConfigError: the template shows no calls that a parser knows.
    """
    policy = config.policy
    rendered = policy.api == "completions" and (policy.tokenizer or policy.model)
    if policy.address.loads_weights:
        rendered = policy.address.rest
    if config.format.tool_parser or not rendered:
        return config.format.tool_parser or "hermes"
    trust, template = policy.trust_remote_code, policy.chat_template
    try:
        chat = ChatTemplate.load(rendered, revision=policy.revision, trust_remote_code=trust, template=template)
    except ConfigError:  # reported when the policy is opened
        return "hermes"
    if parser := parser_of(str(chat.tokenizer.chat_template)):
        return parser
    end = chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn)
    fitting = (name for name in CHAT_TEMPLATES if name.endswith(WITH_TOOLS) and CHAT_TEMPLATES[name] == end)
    flag = f"--chat-template {next(fitting, 'FILE')}"
    raise ConfigError(
        f"the chat template of {policy.spec} shows no function calls that are known here; add {flag}, or say how it "
        "writes them with --set format.tool_parser=...",
        add=flag,
    )


def check_prompts(policy: ModelAddress, format: Format) -> None:
    """Warn if the card in the folder of a policy shows that it was trained in another format, or with other prompts."""
    if carried_fingerprint(policy) not in (None, format.fingerprint):
        log.warning(
            "the policy was trained with other prompts, or with passages shown in another way; train it again, or give "
            "its prompts with --prompts",
            policy=policy,
        )


__all__ = [
    "FORMATS",
    "Block",
    "Format",
    "PromptSet",
    "Reading",
    "ReasonRAGFormat",
    "Stage",
    "StreamFormat",
    "check_prompts",
    "open_format",
    "open_recorded",
]
