"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from reasonrag.core.config import Config
from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.plugins import import_plugin, make_plugin
from reasonrag.core.settings import CHAT_TEMPLATES, WITH_TOOLS, carried_fingerprint
from reasonrag.core.types import Question
from reasonrag.formats.base import Block, Format, PromptSet, Reading, Stage
from reasonrag.formats.baselines import BASELINES, FLAREFormat, SKRFormat
from reasonrag.formats.dialects import R1SearcherFormat, ReActFormat
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.formats.neighbours import Neighbours
from reasonrag.formats.reasonrag import ReasonRAGFormat
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.search_p1 import SearchP1Format
from reasonrag.formats.search_r1 import SearchR1Format
from reasonrag.formats.stream import StreamFormat
from reasonrag.formats.tool_calls import ToolCallsFormat, parser_of
from reasonrag.formats.when_to_search import WhenToSearchFormat
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.storage.records import read_calls

log = structlog.get_logger()

# Those that policies are trained in. Each is called with a `PromptSet` and how passages are shown: `passage_order`,
# `max_passage_chars`; so is each of `BASELINES`.
FORMATS: dict[str, Callable[..., Format]] = {
    format.name: format
    for format in (
        *(ReasonRAGFormat, SearchR1Format, HiPRAGFormat, SearchP1Format, WhenToSearchFormat),
        *(ToolCallsFormat, R1SearcherFormat, ReActFormat),
    )
}


def open_format(config: Config, *, warn: bool = True, to_train: bool = False) -> Format:
    """Create the format `format.name`, with its prompt texts; `warn` if the policy was trained with others.

    Raises:
        ConfigError: there is no such format or prompt set, or the format is a baseline and is `to_train` a policy.
    """
    name = config.format.name
    known = FORMATS | BASELINES
    if name not in known and not name.startswith("python:"):
        raise ConfigError(f"format {name!r} is unknown; known: {', '.join(known)}, python:PACKAGE.MODULE:NAME")
    if to_train and name in BASELINES:
        raise ConfigError(
            f"format {name} is a baseline of the papers, made to be compared with (eval --format {name}); policies "
            f"are trained in one of {', '.join(FORMATS)}"
        )
    make = known[name] if name in known else import_plugin(name)
    options: dict[str, Any] = {}
    if make is ToolCallsFormat:
        options["parser"] = _tool_parser(config)
    elif make is FLAREFormat:
        options["threshold"] = config.baselines.threshold
    elif isinstance(make, type) and issubclass(make, SKRFormat):
        options["neighbours"] = _neighbours(config, make)
    if name not in known:
        make = partial(make_plugin, name, ("fingerprint", "prompt", "parse"))
    format: Format = make(
        PromptSet.find(config.format.prompts),
        passage_order=config.retrieval.passage_order,
        max_passage_chars=config.retrieval.max_passage_chars,
        **options,
    )
    if warn and name not in BASELINES:  # nobody was trained for these
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


def _neighbours(config: Config, format: type[SKRFormat]) -> Neighbours:
    settings, ways = config.baselines, [way.name for way in format.ways]
    if settings.labels is None:
        raise ConfigError(
            f"format {format.name} chooses among {', '.join(ways)} by what suited similar questions; run eval on "
            f"training questions with --format {','.join(ways)}, and give its --out as --labels"
        )
    return Neighbours.read(settings.labels, ways, k=settings.neighbours, encoder=settings.encoder)


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
    except ConfigError:  # whoever opens the policy says it
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
    """Warn if the folder of a policy says that it was trained in another format, or with other prompts."""
    if carried_fingerprint(policy) not in (None, format.fingerprint):
        log.warning(
            "the policy was trained with other prompts, or with passages shown in another way; train it again, or give "
            "its prompts with --prompts",
            policy=policy,
        )


__all__ = [
    "BASELINES",
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
