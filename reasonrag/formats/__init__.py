"""Formats: how a trajectory becomes prompts, and how completions become actions."""

from __future__ import annotations

from reasonrag.formats.base import Format, Stage
from reasonrag.formats.promptset import PromptSet
from reasonrag.formats.reasonrag import ReasonRAGFormat

FORMATS: dict[str, type[ReasonRAGFormat]] = {ReasonRAGFormat.name: ReasonRAGFormat}

__all__ = ["FORMATS", "Format", "PromptSet", "ReasonRAGFormat", "Stage"]
