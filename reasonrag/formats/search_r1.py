"""Search-R1's format, the outcome baseline: think, search, read, think, answer (arXiv:2503.09516)."""

from __future__ import annotations

from reasonrag.formats.stream import StreamFormat


class SearchR1Format(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<answer>`: a thought first, and one after each search's passages."""

    name = "search_r1"
