"""Search-P1's format: a plan, then one tool call at a time (arXiv, Alg. 2, App. D.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from reasonrag.formats.reading import Reading
from reasonrag.formats.stream import SEALED, StreamFormat, elements


class SearchP1Format(StreamFormat):
    """`<reasoning>` with an explicit plan, then `<tool_call>`, `<tool_response>`, and `<answer>`.

    The first reasoning is the plan (Eq. 2); further ones may stand before each call and before the answer.
    """

    name = "search_p1"
    search = "tool_call"
    found = "tool_response"
    thinks = "reasoning"
    concludes = "reasoning"
    stops = ("</tool_call>", "</answer>")
    opening = "<reasoning>"
    grammar = re.compile("T(SIT?)*A")

    def _read(self, text: str, found: Sequence[str]) -> Reading:
        plan = next((body for tag, body in elements(text, ("reasoning",))[0] if body != SEALED), "")
        return replace(super()._read(text, found), plan=plan)
