"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from collections.abc import Callable

from reasonrag.formats.base import Format, Stage
from reasonrag.formats.promptset import PromptSet
from reasonrag.formats.reasonrag import ReasonRAGFormat

# Each is called with a `PromptSet` and how passages are shown: `passage_order`, `max_passage_chars`.
FORMATS: dict[str, Callable[..., Format]] = {ReasonRAGFormat.name: ReasonRAGFormat}

__all__ = ["FORMATS", "Format", "PromptSet", "ReasonRAGFormat", "Stage"]
