"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError
from reasonrag.core.plugins import import_plugin
from reasonrag.core.settings import carried_fingerprint
from reasonrag.formats.base import Block, Format, PromptSet, Reading, Stage
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.formats.reasonrag import ReasonRAGFormat
from reasonrag.formats.search_p1 import SearchP1Format
from reasonrag.formats.search_r1 import SearchR1Format
from reasonrag.formats.stream import StreamFormat
from reasonrag.formats.when_to_search import WhenToSearchFormat

log = structlog.get_logger()

# Each is called with a `PromptSet` and how passages are shown: `passage_order`, `max_passage_chars`.
FORMATS: dict[str, Callable[..., Format]] = {
    format.name: format
    for format in (ReasonRAGFormat, SearchR1Format, HiPRAGFormat, SearchP1Format, WhenToSearchFormat)
}


def open_format(config: Config) -> Format:
    """Create the format `format.name`, with its prompt texts."""
    name = config.format.name
    if name not in FORMATS and not name.startswith("python:"):
        raise ConfigError(f"format {name!r} is unknown; known: {', '.join(FORMATS)}, python:PACKAGE.MODULE:NAME")
    make = FORMATS[name] if name in FORMATS else import_plugin(name.removeprefix("python:"))
    format: Format = make(
        PromptSet.find(config.format.prompts),
        passage_order=config.retrieval.passage_order,
        max_passage_chars=config.retrieval.max_passage_chars,
    )
    check_prompts(config.policy.spec, format)
    return format


def check_prompts(policy: str | None, format: Format) -> None:
    """Warn if the folder of a policy says that it was trained in another format, or with other prompts."""
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
]
