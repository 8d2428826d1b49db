"""Markdown tables, and text from outside made inert for Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from reasonrag.core.text import one_line, printable

_PUNCTUATION = re.compile(r"([!-+./:-@\[-`{-~])")  # ASCII punctuation except `,` and `-`
# Words, numbers and intervals such as "t0.7_s8_k3" or "0.500 [0.250, 0.750]" hold no markup and stay readable.
_PLAIN = re.compile(r"(?:[^\W_]|[ ,+/-]|(?<=[^\W_])_(?=[^\W_])|\.(?=\d)|\[(?=[-+\d])|(?<=\d)\])*")


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a Markdown table. Cells are Markdown: pass text from outside through `inert_markdown` first.

    >>> list(table_lines(["policy", "EM"], [["`base`", 0.5]]))
    ['| policy | EM |', '| --- | --- |', '| `base` | 0.5 |']
    """
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def inert_markdown(text: object) -> str:
    r"""Return text from outside as one line without markup, links or hidden characters.

    >>> inert_markdown("0.500 [0.250, 0.750]"), inert_markdown("[x](http://evil)")
    ('0.500 [0.250, 0.750]', '\\[x\\]\\(http\\:\\/\\/evil\\)')
    """
    line = printable(one_line(str(text)))
    return line if _PLAIN.fullmatch(line) else _PUNCTUATION.sub(r"\\\1", line)
