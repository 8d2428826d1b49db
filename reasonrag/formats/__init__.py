"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable

from reasonrag.formats.base import Block, Format, PromptSet, Reading, Stage
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.formats.reasonrag import ReasonRAGFormat
from reasonrag.formats.search_p1 import SearchP1Format
from reasonrag.formats.search_r1 import SearchR1Format
from reasonrag.formats.stream import StreamFormat
from reasonrag.formats.when_to_search import WhenToSearchFormat

# Each is called with a `PromptSet` and how passages are shown: `passage_order`, `max_passage_chars`.
FORMATS: dict[str, Callable[..., Format]] = {
    format.name: format
    for format in (ReasonRAGFormat, SearchR1Format, HiPRAGFormat, SearchP1Format, WhenToSearchFormat)
}

__all__ = ["FORMATS", "Block", "Format", "PromptSet", "Reading", "ReasonRAGFormat", "Stage", "StreamFormat"]
