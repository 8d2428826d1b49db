"""Rows of files that people bring: JSON lines, JSON lists, CSV, TSV, Parquet; and the calls of recorded agents."""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import math
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import DataError
from reasonrag.core.settings import refuse_links
from reasonrag.core.text import excerpt, parse_json, quoted, valid_unicode
from reasonrag.storage.parquet import Row, parquet_rows

log = structlog.get_logger()

NumberedRow = tuple[int, Any]

CALLS = "calls.jsonl"  # of a recording
NO_OBJECT = "not a JSON object in UTF-8 with each key once"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")

SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\b(.*)")
_NAMED_ROWS = 5  # of one kind of problem, in a message
_MOST_LINE_BYTES = 64 << 20
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, zstd, zip
_MOST_BLANK_BYTES = 1 << 20
_MOST_UNPACKED = 200  # times the size of a .gz file, after its first 64 MiB; rows of real texts are 3 to 20 times
_MOST_JSON_BYTES = 2 << 30  # a list is read as a whole, and takes several times as much memory
_CALL_FIELDS = ("conversation", "call", "request", "message", "finish_reason")


def raw_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the 1-based number and the value of each row of a user's file.

    A line ends at "\\n" alone: U+2028 inside a string is text. Blank lines are skipped, and count as
    rows. Every kind of file except .json is read in constant memory.

    Raises:
        DataError: the file is missing, of an unknown kind, or damaged as a whole.
    """
    name = path.name.lower()
    if not path.exists():
        raise DataError(f"{path}: file not found; check its name and folder")
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; give one of {', '.join(SUFFIXES)}")
    if not path.is_file():  # a pipe would be waited for
        raise DataError(f"{path}: not a file; give one of {', '.join(SUFFIXES)}")
    kinds = {".parquet": parquet_rows, ".json": _json_rows, ".csv": _table_rows, ".tsv": _table_rows}
    kind = kinds.get(Path(name.removesuffix(".gz")).suffix, _jsonl_rows)
    try:
        yield from kind(path)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: cannot be read ({excerpt(str(error))}); is the file complete?") from error


def _jsonl_rows(path: Path) -> Iterator[NumberedRow]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, _parsed(line)


def _table_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a CSV or TSV file whose first line names the columns, such as DPR's passages."""
    lines = (line.decode("utf-8-sig") for line in _lines(path))
    try:
        first = next(lines, "")
        delimiter = max("\t,;", key=first.count)
        names = next(csv.reader([first], delimiter=delimiter), [])
        if len(set(names)) < len(names):
            raise DataError(f"{path}: its first line names a column twice")
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        for row in rows:
            if len(row) > len(names):
                raise DataError(
                    f"{path}: line {1 + rows.line_num} has {len(row)} fields, and the first line {len(names)} names; "
                    f"the first line has to name every column, and a text that contains {delimiter!r} needs quotes"
                )
            if delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in row):
                problem = f"{path}: the row that ends in line {1 + rows.line_num} has a text of several lines with tabs"
                raise DataError(f"{problem}, as between two stray quotation marks; double each mark within a text")
            if row:
                yield 1 + rows.line_num, dict(zip(names, row, strict=False))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not CSV or TSV in UTF-8", quoting=error) from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines; raise DataError if one is too long, or the file is of another kind or unpacks to too much."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(path.open("rb"))
        unpacked, left = None, math.inf
        members: Iterator[Any] = iter(())
        if path.name.lower().endswith(".gz"):
            file = unpacked = gzip.GzipFile(fileobj=file)
            left = _MOST_LINE_BYTES + _MOST_UNPACKED * path.stat().st_size
            # wiki-18.jsonl.gz, the usual Wikipedia dump of 2018, is a tar archive of one file.
            if unpacked.peek(512)[257:262] == b"ustar":
                archive = stack.enter_context(tarfile.open(fileobj=unpacked, mode="r|"))
                # macOS packs a small file ._NAME beside each.
                members = (it for it in archive if it.isfile() and (it.size > 1 << 20 or "/._" not in f"/{it.name}"))
                member = next(members, None)
                file = archive.extractfile(member) if member else None
        numbers, blank_bytes = itertools.count(1), 0
        while file is not None and left >= 0 and (line := file.readline(_MOST_LINE_BYTES + 1)):
            number = next(numbers)
            if len(line) > _MOST_LINE_BYTES:  # a small file may unpack to more than the memory
                problem = f"{path}: row {number} has more than {_MOST_LINE_BYTES >> 20} MiB"
                raise DataError(f"{problem}; rows end at a line's end")
            if number == 1 and line.startswith(_COMPRESSED):
                raise DataError(f"{path}: its content is compressed; unpack it, or name gzip .jsonl.gz")
            if number == 1 and (line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:4]):
                raise DataError(f"{path}: its text is in UTF-16 or UTF-32; save it in UTF-8")
            blank_bytes += 0 if line.strip() else len(line)
            if blank_bytes > _MOST_BLANK_BYTES:
                raise DataError(
                    f"{path}: more than {_MOST_BLANK_BYTES >> 20} MiB of blank lines; is it a file of rows?"
                )
            left -= len(line)
            yield line
        if next(members, None) is not None:
            raise DataError(f"{path}: a tar archive of several files, of which one would be read; unpack it")
        if unpacked is not None:
            # The checksum stands at the end, behind a tar archive's last member.
            while left >= 0 and (rest := unpacked.read(1 << 20)):
                left -= len(rest)
        if left < 0:
            raise DataError(f"{path}: unpacks to more than {_MOST_UNPACKED} times its size, which no rows do")


def _json_rows(path: Path) -> Iterator[NumberedRow]:
    size = path.stat().st_size
    # Memory may run out below that size, too, within a
    # container or under ulimit: that is the same message.
    try:
        if size > _MOST_JSON_BYTES:
            raise MemoryError
        rows = parse_json(path.read_bytes())
    except MemoryError:
        raise DataError(
            f"{path}: a .json file of {size / 1e9:.1f} GB is too large to be read as a whole; write it as .jsonl "
            "(jq -c '.[]') or .parquet, which are read row by row"
        ) from None
    except ValueError as error:
        problem = f"{path}: not JSON, which holds one list (one object per line is .jsonl)"
        raise DataError(problem, quoting=error) from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds one JSON {type(rows).__name__}; a list of rows is needed")
    yield from enumerate(rows, 1)


def _parsed(line: bytes) -> Any:
    """Return the value of a line of JSON, or None if it is not JSON or a key stands twice in an object."""
    try:
        return parse_json(line.decode("utf-8-sig"))
    except ValueError:
        return None


def warn_left_out(folder: Path, paths: Iterable[Path], taken: Collection[Path]) -> None:
    """Log which files and links in a folder are not read, by the ending of their names."""
    left = Counter(
        path.suffix or path.name for path in paths if path not in taken and (path.is_file() or path.is_symlink())
    )
    if left:
        kinds = ", ".join(f"{count} {kind}" for kind, count in left.most_common(5))
        log.warning(f"{folder}: some files are not read ({kinds})", read=len(taken))


def missing_shards(files: Iterable[Path]) -> str:
    """Return how many of the files STEM-00000-of-000NN, ... are there if some are not; else ""."""
    shards = Counter(match.groups() for match in map(SHARD.match, map(str, files)) if match)
    lacking = ((there, int(count), f"{Path(stem).name}-*{end}") for (stem, count, end), there in shards.items())
    return ", ".join(
        f"{there} of {count} files of {name} are there" for there, count, name in lacking if there != count
    )


def read_rows(path: Path, problems: RowProblems) -> Iterator[NumberedRow]:
    """Yield the 1-based number and the object of each row of a file, as `raw_rows`; other rows go to `problems`.

    Raises:
        DataError: the file is missing, of an unknown kind, or damaged as a whole.
    """
    for number, row in raw_rows(path):
        if isinstance(row, dict):
            yield number, row
        else:
            problems.add(NO_OBJECT, number)


class RowProblems:
    """Collects rows that cannot be used, by kind of problem; `check` raises one error that names them all."""

    def __init__(self, source: str) -> None:
        """Name the file or data set (`source`) for the message."""
        self.source = source
        self._rows: dict[str, list[str]] = {}  # the first few of each kind, as a message names no more
        self.counts = Counter[str]()

    def add(self, kind: str, row: int | str, value: object = None) -> None:
        """Note that a row, named or 1-based, has the problem `kind`; show `value` if it helps."""
        self.counts[kind] += 1
        if self.counts[kind] <= _NAMED_ROWS:
            self._rows.setdefault(kind, []).append(str(row) if value is None else f"{row} {quoted(value)}")

    def check(self, advice: str) -> None:
        """Raise DataError, ending with `advice`, if any problem was noted: each in how many rows, and the first few."""
        problems = []
        for kind, count in self.counts.items():
            named = ", ".join(self._rows[kind]) + (", ..." if count > _NAMED_ROWS else "")
            problems.append(f"{kind} in {count} row{'s' * (count > 1)} ({named})")
        if problems:
            raise DataError(f"{self.source}: {'; '.join(problems)}. {advice}")


def text_id(value: object) -> str | None:
    """Return an id as text, or None if it is missing, empty, or neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return valid_unicode(str(value)).strip() or None


def lack(name: str, value: object) -> str:
    """Return why the value of a column cannot be its id or text.

    >>> lack("id", None), lack("id", b"q1")
    ('id missing or empty', 'id of type bytes')
    """
    # NaN is what pandas writes for a missing value.
    is_missing = value is None or isinstance(value, str) or value != value
    return f"{name} missing or empty" if is_missing else f"{name} of type {type(value).__name__}"


def read_calls(folder: Path) -> Iterator[Row]:
    """Yield the recorded calls in order: `conversation`, `call`, `request`, `message` and `finish_reason` of each.

    A last line that a kill cut off is left out.

    Raises:
        DataError: the file cannot be read, or another line is not a call.
    """
    refuse_links(folder)
    file = folder / CALLS
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name a folder that contrib.record wrote") from error
    if _parsed(lines[-1]) is None:  # empty, or cut off by a kill
        lines.pop()
    begun = set()
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        is_whole = isinstance(row, dict) and row.keys() >= {*_CALL_FIELDS}
        if not (is_whole and isinstance(row["conversation"], str) and isinstance(row["call"], int)):
            raise DataError(f"{file}, line {number} is no recorded call; was it edited?")
        if (of := (row["conversation"], row["call"])) in begun:
            problem = f"{file}, line {number}: call {of[1]} of {of[0]} stands there twice"
            raise DataError(f"{problem}; give each recording a folder")
        begun.add(of)
        yield {name: row[name] for name in _CALL_FIELDS}
