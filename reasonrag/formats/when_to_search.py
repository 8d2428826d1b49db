"""The format of "Learning when to search": think, search, read, reflect, answer (sec. 3.2 and 3.3, App. B.4)."""

from __future__ import annotations

import re

from reasonrag.formats.stream import StreamFormat


class WhenToSearchFormat(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<reflect>`, `<answer>`.

    Either think, reflect, answer; or a thought, then as often as needed search, information, reflect and perhaps
    another thought, then the answer (App. B.4, points 2 to 5).
    """

    name = "when_to_search"
    concludes = "reflect"
    grammar = re.compile("T(R|(SIRT?)+)A")
