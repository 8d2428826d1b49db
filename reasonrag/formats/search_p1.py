"""Search-P1's format: a plan, then one tool call at a time (Search-P1, Alg. 2 and App. D.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reasonrag.formats.stream import StreamFormat


class SearchP1Format(StreamFormat):
    """`<reasoning>` with an explicit plan, then `<tool_call>`, `<tool_response>`, and `<answer>`.

    Well-formed: `reasoning (tool_call tool_response reasoning?)* answer`. The first reasoning is the plan, which Alg. 2
    opens itself (line 1) and App. D.1 demands ("In the first turn, you MUST break the question down"); it also asks for
    one call a turn, and for a check of each result, which Fig. 10 shows may be left out before the next call. That a
    trajectory without a call earns nothing (Alg. 3, lines 2 to 7) is the reward's business, not the format's.

    The budget B of Alg. 2 counts calls: it is `max_steps - 1`, so the paper's B = 4 is `max_steps` 5.
    """

    name = "search_p1"
    search = "tool_call"
    found = "tool_response"
    thinks = "reasoning"
    concludes = "reasoning"
    stops = ("</tool_call>", "</answer>")
    opening = "<reasoning>"
    grammar = re.compile("T(SIT?)*A")

    def _plan(self, pieces: Sequence[tuple[str, str]]) -> str:
        return next((body for tag, body in pieces if tag == "reasoning"), "")
