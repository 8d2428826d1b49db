"""Tables as plain data, which a terminal and Markdown pages print; HTML templates read their fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reasonrag.core.text import one_line, printable

if TYPE_CHECKING:
    import rich.table

_PUNCTUATION = re.compile(r"([!-+./:-@\[-`{-~])")  # ASCII punctuation except `,` and `-`
# Words, numbers and intervals such as "t0.7_s8_k3" or
# "0.500 [0.250, 0.750]" hold no markup and stay readable.
_PLAIN = re.compile(r"(?:[^\W_]|[ ,+/-]|(?<=[^\W_])_(?=[^\W_])|\.(?=\d)|\[(?=[-+\d])|(?<=\d)\])*")
_CELL_CHARS = 200  # of a name or a list of causes from outside


def inert_markdown(text: object) -> str:
    r"""Return text from outside as one line without markup, links or hidden characters.

    >>> inert_markdown("0.500 [0.250, 0.750]"), inert_markdown("[x](http://evil)")
    ('0.500 [0.250, 0.750]', '\\[x\\]\\(http\\:\\/\\/evil\\)')
    """
    line = printable(one_line(str(text)))
    return line if _PLAIN.fullmatch(line) else _PUNCTUATION.sub(r"\\\1", line)


class Bold(str):
    """A cell in bold type."""

    bold = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells as plain text; the renderers escape markup and control characters.

    The first `heads` cells of a row name it. A table without column names has no header.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    heads: int = 1

    def markdown(self, escape: Callable[[object], str] = inert_markdown) -> Iterator[str]:
        """Yield the lines of a Markdown table, without the title; `escape=str` keeps the markup of cells.

        >>> list(Table("", ["policy", "EM"], [["base", 0.5]]).markdown())
        ['| policy | EM |', '| --- | --- |', '| base | 0.5 |']
        """
        yield f"| {' | '.join(map(escape, self.columns))} |"
        yield f"|{' --- |' * len(self.columns)}"
        for row in self.rows:
            cells = []
            for cell in row:
                text = escape(str(cell) if escape is str else str(cell)[:_CELL_CHARS])
                cells.append(f"**{text}**" if isinstance(cell, Bold) else text)
            yield f"| {' | '.join(cells)} |"

    def terminal(self) -> rich.table.Table:
        """Return the table for `rich.print`."""
        import rich.table
        from rich.text import Text

        table = rich.table.Table(title=Text(printable(one_line(self.title))) or None, title_justify="left")
        table.show_header = any(self.columns)
        for place, column in enumerate(self.columns):
            name = Text(printable(one_line(column)))  # a plain string would be markup
            table.add_column(name, overflow="fold", justify="left" if place < self.heads else "right")
        for row in self.rows:
            table.add_row(*(Text(printable(one_line(str(cell)))) for cell in row))
        return table
