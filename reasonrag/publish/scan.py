"""Search files for what must not be published by mistake: secrets, paths of this machine, e-mail addresses.

The search covers every string of Parquet files, the header of weights, and every line of other files. A finding never
shows a secret, nor an address or a path that overlaps one.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.core.text import find_secrets, one_line, printable, redact
from reasonrag.storage.parquet import leaves

if TYPE_CHECKING:
    import pyarrow as pa

SECRET, PATH, EMAIL = "secret", "path", "email"
Patterns = tuple[tuple[str, str], ...]  # kind, and an RE2 pattern with a group `found`

_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_BATCH_ROWS = 1_000
_SHOWN_CHARS = 60
# RE2: linear time, no look-around. `file:///home/me` is a path of a machine, `url.example/home/page` is not.
_FIRST = r"(?:^|file://|\\[nrt]|[^A-Za-z0-9_./~%])"
_HOMES = r"""/home/[^\s/"']+|/Users/[^\s/"']+|/root/[^\s"']|[A-Za-z]:(?:\\+|/)Users(?:\\+|/)[^\s\\/"']+"""
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")  # as `inert_markdown` escapes punctuation
_EMAIL = r"[A-Za-z0-9._%+\-]+@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, with its first position."""

    file: str  # relative to the folder that was searched
    column: str  # of a table, such as `prompt[].content` if it is nested; empty in a text file
    row: int  # row of the table or line of the file, from 1
    kind: str  # SECRET, PATH or EMAIL
    what: str  # the kind of secret, or the path or address itself, shortened and printable
    count: int  # values or lines in this column or file that hold it

    def __str__(self) -> str:
        where = f"column {self.column}, row {self.row:,}" if self.column else f"line {self.row:,}"
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return f"{self.file}, {where}{more}: {self.kind} {self.what}"


def places_of(*folders: Path) -> tuple[str, ...]:
    """Return names of this machine: folders, working directory, home, and the host's name unless it is a plain word."""
    paths = {str(folder.resolve()) for folder in (*folders, Path.cwd(), Path.home())}
    host = socket.gethostname()
    hosts = {host} if len(host) > 4 and re.search(r"[\d.\-]", host) else set()
    # Folders at the root, such as `/data`, are on many machines.
    return tuple(sorted(hosts | {path for path in paths if path.count("/") > 1}))


def scan(folder: Path, files: Collection[str], places: Sequence[str]) -> list[Finding]:
    """Search files of a folder; return the findings by file and column.

    Args:
        folder: to be published.
        files: relative to it.
        places: see `places_of`.
    """
    patterns = _patterns(places)
    rows_and_counts: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for name in sorted(files):
        for column, row, kind, what, times in _in_file(folder / name, patterns):
            key = (name, column, kind, what)
            first, count = rows_and_counts.get(key, (row, 0))
            rows_and_counts[key] = (first, count + times)
    return [
        Finding(file, column, row, kind, what, count)
        for (file, column, kind, what), (row, count) in rows_and_counts.items()
    ]


def _patterns(places: Sequence[str]) -> Patterns:
    folders = "".join(f"|{re.escape(place)}" for place in places if place.startswith("/"))
    hosts = [re.escape(place) for place in places if not place.startswith("/")]
    host_patterns = [(PATH, rf"\b(?P<found>{'|'.join(hosts)})\b")] if hosts else []
    return ((PATH, rf"{_FIRST}(?P<found>{_HOMES}{folders})"), *host_patterns, (EMAIL, f"(?P<found>{_EMAIL})"))


def _in_file(path: Path, patterns: Patterns) -> Iterator[tuple[str, int, str, str, int]]:
    """Yield column, row, kind, what, and the number of values that hold it."""
    if path.suffix == ".parquet":
        yield from _in_table(path, patterns)
    else:
        text = _text(path)
        for secret in find_secrets(text):  # in the whole text at once: a key may have many lines
            yield "", text.count("\n", 0, secret.start) + 1, SECRET, secret.kind, 1
        import pyarrow as pa

        for kind, what, hits in _hits(pa.array(redact(text).split("\n")), patterns):
            yield "", hits[0] + 1, kind, what, len(hits)


def _text(path: Path) -> str:
    """Return a file's text: of weights the header, of a card the text that readers see."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER_BYTES))
        return header.decode("utf-8", "replace")
    text = path.read_text(encoding="utf-8", errors="replace")
    return _ESCAPED.sub(r"\1", text) if path.suffix == ".md" else text


def _in_table(path: Path, patterns: Patterns) -> Iterator[tuple[str, int, str, str, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 1
    with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            for name, values, rows in leaves(batch):
                for kind, what, hits in _hits(values, patterns) if pa.types.is_string(values.type) else ():
                    row = hits[0] if rows is None else rows[hits[0]].as_py()
                    yield name, first + row, kind, what, len(hits)
            first += batch.num_rows


def _hits(values: pa.Array, patterns: Patterns) -> Iterator[tuple[str, str, list[int]]]:
    """Yield kind, what to show, and the positions in `values` that hold it."""
    import pyarrow.compute as pc

    unique = values.drop_null().unique()  # siblings share their prompts, searches their passages
    texts = unique.to_pylist()
    suspects: dict[str, None] = dict.fromkeys(_secretive(texts))
    for _, pattern in patterns:
        suspects |= dict.fromkeys(unique.filter(pc.match_substring_regex(unique, pattern)).to_pylist())
    for text in suspects:
        positions: list[int] | None = None
        for kind, what in _found(text, patterns):
            if positions is None:
                positions = pc.indices_nonzero(pc.equal(values, text)).to_pylist()
            yield kind, what, positions


def _secretive(texts: Sequence[str]) -> list[str]:
    """Return the texts that hold secrets. One search over all of them together rules out most batches."""
    return [text for text in texts if find_secrets(text)] if find_secrets("\n\n".join(texts)) else []


def _found(text: str, patterns: Patterns) -> Iterator[tuple[str, str]]:
    """Yield kind and description of everything in one text; of addresses and paths, the first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = dict.fromkeys(secret.kind for secret in find_secrets(text))
    yield from ((SECRET, kind) for kind in kinds)
    shown = pa.array([redact(text) if kinds else text])
    for kind, pattern in patterns:
        (match,) = pc.extract_regex(shown, pattern).to_pylist()
        if match:
            yield kind, _excerpt(match["found"])


def _excerpt(found: str) -> str:
    line = one_line(printable(found))
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"
