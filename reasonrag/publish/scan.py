"""Search files for what must not be published by mistake: secrets, paths of this machine, e-mail addresses.

The search covers every string of Parquet files, the header of weights, and every line of other files. A
finding never shows a secret, nor an address or a path that overlaps one.
"""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.text import find_secrets, one_line, printable, redact
from reasonrag.storage.parquet import leaves

SECRET, PATH, EMAIL = "secret", "path", "email"
Patterns = list[tuple[str, re.Pattern[str]]]  # each with its kind

_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_BATCH_ROWS = 1_000
_SHOWN_CHARS = 60
# `file:///home/me` is a path of a machine, `url.example/home/page` is not. The look-behinds come after
# the first character: a pattern that begins with one is ten times slower.
_POSIX_PATH = (
    r"""/(?:(?<![A-Za-z0-9_./~%]/)|(?<=file:///)|(?<=\\[nrt]/))(?:home/[^\s/"']+|Users/[^\s/"']+|root/[^\s"']"""
)
_WINDOWS_PATH = r"""[A-Za-z]:(?<![A-Za-z0-9_./~%][A-Za-z]:)(?:\\+|/)Users(?:\\+|/)[^\s\\/"']+"""
# The search begins at the start of a word and ends after 64
# characters: a long text without blanks takes linear time.
_EMAIL = r"(?<![\w.%+\-])[A-Za-z0-9._%+\-]{1,64}@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)*\.[A-Za-z]{2,}"
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")  # as `inert_markdown` escapes punctuation


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
    names = {str(folder.resolve()) for folder in (*folders, Path.cwd(), Path.home())}
    # Folders at the root, such as `/data`, are on many machines.
    names = {name for name in names if name.count("/") > 1}
    host = socket.gethostname()
    if len(host) > 4 and re.search(r"[\d.\-]", host):
        names.add(host)
    return tuple(sorted(names))


def scan(folder: Path, files: Collection[str], places: Sequence[str]) -> list[Finding]:
    """Search files of a folder; return the findings by file and column.

    Args:
        folder: to be published.
        files: relative to it.
        places: see `places_of`.
    """
    folders = "".join(f"|{re.escape(place[1:])}" for place in places if place.startswith("/"))
    hosts = [(PATH, re.compile(rf"\b{re.escape(place)}\b")) for place in places if not place.startswith("/")]
    homes = [(PATH, re.compile(f"{_POSIX_PATH}{folders})")), (PATH, re.compile(_WINDOWS_PATH))]
    patterns = [*homes, *hosts, (EMAIL, re.compile(_EMAIL))]
    rows: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for file in sorted(files):
        search = _search_table if file.endswith(".parquet") else _search_text
        for column, row, kind, what in search(folder / file, patterns):
            rows[file, column, kind, what].append(row)
    findings = []
    for (file, column, kind, what), positions in rows.items():
        findings.append(Finding(file, column, positions[0], kind, what, len(positions)))
    return findings


def _search_text(path: Path, patterns: Patterns) -> Iterator[tuple[str, int, str, str]]:
    """Yield an empty column, the line, the kind and the description of each finding.

    Of weights, the text is their header; of a card, what readers see of it.
    """
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, _MOST_HEADER_BYTES)).decode("utf-8", "replace")
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        text = _ESCAPED.sub(r"\1", text) if path.suffix == ".md" else text
    for secret in find_secrets(text):  # in the whole text at once: a key may have many lines
        yield "", text.count("\n", 0, secret.start) + 1, SECRET, secret.kind
    for number, line in enumerate(redact(text).split("\n"), 1):
        for kind, what in _matches(line, patterns):
            yield "", number, kind, what


def _search_table(path: Path, patterns: Patterns) -> Iterator[tuple[str, int, str, str]]:
    """Yield the column, the row, the kind and the description of each finding."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first_row = 1
    with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
        schema = file.schema_arrow
        noted = [metadata for metadata in (schema.metadata, *(field.metadata for field in schema)) if metadata]
        words = [word.decode(errors="replace") for metadata in noted for pair in metadata.items() for word in pair]
        for kind, what in _findings("\n".join(words), patterns):
            yield "metadata", 0, kind, what
        for batch in file.iter_batches(_BATCH_ROWS):
            for column, values, rows in leaves(batch):
                if not pa.types.is_string(values.type):
                    continue
                # Siblings share their prompts, searches their passages: each text is searched once.
                positions: defaultdict[str, list[int]] = defaultdict(list)
                for position, text in enumerate(values.to_pylist()):
                    if text:
                        positions[text].append(position if rows is None else rows[position].as_py())
                # One search over a thousand rows, which in most batches finds
                # nothing, is much faster than a thousand searches.
                together = "\n\n".join(positions)
                if not find_secrets(together) and not any(_matches(together, patterns)):
                    continue
                for text, text_rows in positions.items():
                    for kind, what in _findings(text, patterns):
                        for row in text_rows:
                            yield column, first_row + row, kind, what
            first_row += batch.num_rows


def _findings(text: str, patterns: Patterns) -> Iterator[tuple[str, str]]:
    """Yield the kind and the description of everything in one text; of paths and addresses, the first."""
    secrets = dict.fromkeys(secret.kind for secret in find_secrets(text))
    yield from ((SECRET, kind) for kind in secrets)
    yield from _matches(redact(text) if secrets else text, patterns)


def _matches(text: str, patterns: Patterns) -> Iterator[tuple[str, str]]:
    for kind, pattern in patterns:
        if match := pattern.search(text):
            shown = one_line(printable(match[0]))
            yield kind, shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 1]}…"
