"""The format of "Learning when to search": think, search, read, reflect, answer (sec. 3.2 and 3.3, App. B.4)."""

from __future__ import annotations

import re

from reasonrag.formats.stream import StreamFormat


class WhenToSearchFormat(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<reflect>`, `<answer>`.

    Well-formed is one of the two structures of sec. 3.3: without a search `think reflect answer` (App. B.4, points 1
    and 2); else "multiple iterations of think, search, information, reflect", then the answer. Only the first
    iteration has to think: point 5 lets a policy search again right after it has reflected, as it does in Table 9. So
    `think (reflect | search information reflect (think? search information reflect)*) answer`; between the last
    reflection and the answer nothing may stand (point 4).
    """

    name = "when_to_search"
    concludes = "reflect"
    grammar = re.compile("T(R|SIR(T?SIR)*)A")
