"""Search-R1's format, the outcome baseline: think, search, read, think, answer (arXiv:2503.09516)."""

from __future__ import annotations

from reasonrag.formats.stream import StreamFormat


class SearchR1Format(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<answer>`.

    Well-formed: `think (search information think)* answer`. The paper's template (Table 1) asks for reasoning "first
    every time you get new information", so a thought comes first and one follows each search's passages. Published
    trajectories of policies that were trained without a format reward often leave a thought out (`thought_order`) or
    open with a sentence of their own (`stray_text`): they are not well-formed, their searches and answers are read all
    the same.
    """

    name = "search_r1"
