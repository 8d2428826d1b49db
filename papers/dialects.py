"""Formats of published checkpoints that write marks of their own instead of tags.

Each is named by a configuration, as `--set format.name=python:papers.dialects:ReActFormat`. What such a policy writes
is rewritten into the tags of `search_r1` before it is parsed, and only then, so every reward and metric reads it. The
instructions of the papers are not here, only ours: to give a checkpoint its own, write it into
`FOLDER/NAME/instruction.txt` and add `--prompts FOLDER`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from reasonrag.core.types import Action, Passage, Search
from reasonrag.formats.base import PromptSet, Reading
from reasonrag.formats.stream import StreamFormat

_PROMPTS = Path(__file__).parent / "prompts"


class Dialect(StreamFormat):
    """A growing turn with marks instead of tags. `marks` are patterns with the tags that they stand for, in order."""

    marks: ClassVar[tuple[tuple[re.Pattern[str], str], ...]]

    def __init__(self, prompts: PromptSet | None = None, **shown: Any) -> None:
        prompts = prompts or PromptSet.find()
        if not prompts.has(f"{self.name}/instruction"):
            prompts = PromptSet(_PROMPTS / ("brief" if prompts.folder.name == "brief" else "default"))
        super().__init__(prompts, **shown)

    def in_tags(self, text: str) -> str:
        for mark, meaning in self.marks:
            text = mark.sub(meaning, text)
        return text


class R1SearcherFormat(Dialect):
    """One `<think>` with searches between special marks, then `<answer>` (R1-Searcher, arXiv:2503.05592).

    Well-formed is what Search-R1's order asks for, each piece of the thought being one: `think (search information
    think)* answer`. The engine opens the thought, as the published template does; a text without its tag is read as if
    it had one.
    """

    name = "r1_searcher"
    opening = "<think>"
    cue = "</think>\n\n<answer>"
    stops = ("<|end_of_query|>", "</answer>")
    query_mark = "<|begin_of_query|>"
    marks = (
        (re.compile(r"<\|begin_of_query\|>"), "</think><search>"),
        (re.compile(r"<\|end_of_query\|>"), "</search>"),
        (re.compile(r"<\|begin_of_documents\|>\n?"), "<information>"),
        (re.compile(r"\n?<\|end_of_documents\|>"), "</information><think>"),
    )

    def after(self, action: Action, documents: str) -> str:
        begin, end = "\n\n<|begin_of_documents|>\n", "\n<|end_of_documents|>\n\n"
        return f"{begin}{documents}{end}" if isinstance(action, Search) else ""

    def read_text(self, text: str) -> Reading:
        return super().read_text(text if "<think>" in text else self.opening + text)


class ReActFormat(Dialect):
    """Lines of `Thought:`, `Action: search[...]`, `Observation:` and `Action: finish[...]` (ReAct, arXiv:2210.03629).

    So do FireAct's checkpoints write (arXiv:2310.05915). Well-formed: `Thought (search Observation Thought)* finish`, a
    line each. A text is read from its first thought to its answer: the words around that in FireAct's logs are not part
    of it. The engine stops at the first `]`, so a thought with one in it ends the trajectory.
    """

    name = "react"
    cue = "Action: finish["
    stops = ("]", "\nObservation:")
    final_stops = ("]",)
    query_mark = "search["
    marks = (
        (re.compile(r"(?mi)^Thought(?: \d+)?:[ \t]*(.*)$"), r"<think>\1</think>"),
        (re.compile(r"(?mi)^Action(?: \d+)?:[ \t]*search\[(.*)\][ \t]*$"), r"<search>\1</search>"),
        (re.compile(r"(?mi)^Action(?: \d+)?:[ \t]*finish\[(.*)\][ \t]*$"), r"<answer>\1</answer>"),
        (re.compile(r"(?mi)^Observation(?: \d+)?:[ \t]*(.*)$"), r"<information>\1</information>"),
    )

    def after(self, action: Action, documents: str) -> str:
        return f"\nObservation: {documents}\n" if isinstance(action, Search) else ""

    def documents(self, passages: Sequence[Passage]) -> str:
        """Return the passages in one line."""
        return super().documents(passages).replace("\n", " ")

    def read_text(self, text: str) -> Reading:
        first_thought = re.search("(?mi)^Thought(?: \\d+)?:", text)
        tagged = self.in_tags(text[first_thought.start() :] if first_thought else text)
        answered = tagged.find("</answer>")
        return super().read_text(tagged[: answered + len("</answer>")] if answered >= 0 else tagged)
