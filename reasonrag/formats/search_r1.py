"""Formats of published checkpoints: Search-R1's tags, and two that write marks of their own (`StreamFormat.dialect`).

The instructions of R1-Searcher and ReAct are not shipped: write them into `FOLDER/NAME/instruction.txt` and add
`--prompts FOLDER`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reasonrag.core.types import Action, Passage, Search
from reasonrag.formats.base import Reading
from reasonrag.formats.stream import StreamFormat


class SearchR1Format(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<answer>`: Search-R1's (arXiv:2503.09516), the outcome baseline.

    Well-formed: `think (search information think)* answer`. The paper's template (Table 1) asks for reasoning "first
    every time you get new information", so a thought comes first and one follows each search's passages. Published
    trajectories of policies that were trained without a format reward often leave a thought out (`thought_order`) or
    open with a sentence of their own (`stray_text`): they are not well-formed, their searches and answers are read all
    the same.
    """

    name = "search_r1"


class R1SearcherFormat(StreamFormat):
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
    dialect = (
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


class ReActFormat(StreamFormat):
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
    dialect = (
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
        begun = re.search("(?mi)^Thought(?: \\d+)?:", text)
        tagged = self._in_tags(text[begun.start() :] if begun else text)
        answered = tagged.find("</answer>")
        return super().read_text(tagged[: answered + len("</answer>")] if answered >= 0 else tagged)
