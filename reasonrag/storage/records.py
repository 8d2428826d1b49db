"""Read rows from files (JSON lines, compressed or not, JSON lists, Parquet), and report rows that cannot be used."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import excerpt, parse_json, quoted, valid_unicode

CALLS = "calls.jsonl"  # of a recording
NO_OBJECT = "not a JSON object with each key once"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")

Row = tuple[int, Any]

_NAMED_ROWS = 5  # of one kind of problem, in a message
_MOST_LINE_BYTES = 64 << 20
_MOST_JSON_BYTES = 2 << 30  # a list is read as a whole, and takes several times as much memory
_PARQUET_ROWS = 256  # read at a time: each may hold a whole book


def raw_rows(path: Path, start: int = 0) -> Generator[Row, None, int]:
    """Yield the 1-based number and the value of each row of a file; return the number of rows.

    A line ends at "\\n" alone: U+2028 inside a string is text. Blank lines are skipped, and count as rows. Every kind
    of file except .json is read in constant memory. Skipping the first `start` rows is cheap.

    Raises:
        DataError: the file is missing, of an unknown kind, or damaged as a whole.
    """
    name = path.name.lower()
    if path.exists() and not name.endswith(SUFFIXES):
        raise DataError(f"{path}: unknown kind of file; give one of {', '.join(SUFFIXES)}")
    kind = _parquet_rows if name.endswith(".parquet") else _json_rows if name.endswith(".json") else _jsonl_rows
    try:
        return (yield from kind(path, start))
    except FileNotFoundError:
        raise DataError(f"{path}: file not found; check its name and folder") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: cannot be read ({excerpt(str(error))}); is the file complete?") from error


def _jsonl_rows(path: Path, start: int) -> Generator[Row, None, int]:
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path.name.lower()), 1):
            if len(line) > _MOST_LINE_BYTES:
                raise DataError(
                    f"{path}: row {number} has more than {_MOST_LINE_BYTES >> 20} MiB; rows end at a line's end"
                )
            if number > start and line.strip():
                yield number, parsed(line)
    return number


def _lines(file: IO[bytes], name: str) -> Iterable[bytes]:
    if name.endswith(".zst"):
        return _zstd_lines(file)
    if not name.endswith(".gz"):
        return _lines_of(file)
    unpacked = gzip.GzipFile(fileobj=file)
    return _tar_lines(unpacked) if unpacked.peek(512)[257:262] == b"ustar" else _lines_of(unpacked)


def _lines_of(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Yield lines, and a part of one that is too long: a small file may unpack to more than the memory."""
    return iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b"")


def _tar_lines(unpacked: gzip.GzipFile) -> Iterator[bytes]:
    """Yield the lines of a tar archive of one file, such as wiki-18.jsonl.gz, the usual Wikipedia dump of 2018."""
    with tarfile.open(fileobj=unpacked, mode="r|") as archive:
        member = next((member for member in archive if member.isfile()), None)
        if member and (opened := archive.extractfile(member)):
            yield from _lines_of(opened)
    while unpacked.read(1 << 20):  # up to the end, where the checksum is
        pass


def _zstd_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines, and raise if the file was cut off: zstandard's own reader takes that for the end."""
    import zstandard

    frame, rest = None, b""
    try:
        while len(rest) <= _MOST_LINE_BYTES and (block := file.read(1 << 12)):  # which may unpack to 128 MB
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                *lines, rest = (rest + frame.decompress(block)).split(b"\n")
                yield from lines
                block = frame.unused_data
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None
    if frame is not None and len(rest) <= _MOST_LINE_BYTES:
        raise EOFError("it ends within a frame")
    if rest:
        yield rest


def _json_rows(path: Path, start: int) -> Generator[Row, None, int]:
    size = path.stat().st_size
    try:
        if size > _MOST_JSON_BYTES:
            raise MemoryError
        rows = parse_json(path.read_bytes())
    except MemoryError:
        raise DataError(
            f"{path}: a .json file of {size / 1e9:.1f} GB is too large to be read as a whole; write it as .jsonl "
            "(jq -c '.[]') or .parquet, which are read row by row"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not JSON at line {error.lineno} ({error.msg}); a file of one object per line is .jsonl"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON", quoting=error) from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds one JSON {type(rows).__name__}; a list of rows is needed")
    yield from enumerate(rows[start:], start + 1)
    return len(rows)


def _parquet_rows(path: Path, start: int) -> Generator[Row, None, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= start:
                    number += rows
                    continue
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group]):
                    for row in batch.to_pylist():
                        number += 1
                        if number > start:
                            yield number, row
    except (pa.ArrowException, OverflowError, ValueError) as error:  # as for invalid UTF-8
        raise DataError(f"{path}: not a readable Parquet file", quoting=error) from None
    return number


def parsed(line: bytes) -> Any:
    """Return the value of a line of JSON, or None if it is not JSON or a key stands twice in an object."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def read_rows(path: Path, problems: RowProblems) -> Iterator[Row]:
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
        self._rows: dict[str, list[str]] = {}

    def add(self, kind: str, row: int | str, value: object = None) -> None:
        """Note that a row, named or 1-based, has the problem `kind`; show `value` if it helps."""
        shown = "" if value is None else f" {quoted(value)}"
        self._rows.setdefault(kind, []).append(f"{row}{shown}")

    def lines(self) -> list[str]:
        """Return a line for each kind of problem: in how many rows, and the first few."""
        lines = []
        for kind, rows in self._rows.items():
            named = ", ".join(rows[:_NAMED_ROWS]) + (", ..." if len(rows) > _NAMED_ROWS else "")
            lines.append(f"{kind} in {len(rows)} row{'s' * (len(rows) > 1)} ({named})")
        return lines

    def check(self, advice: str) -> None:
        """Raise DataError, ending with `advice`, if any problem was noted."""
        if self._rows:
            raise DataError(f"{self.source}: {'; '.join(self.lines())}. {advice}")


def text_id(value: object) -> str | None:
    """Return an id as text, or None if it is missing, empty, or neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return valid_unicode(str(value)).strip() or None


def read_calls(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield `conversation`, `call`, `request`, `message` and `finish_reason` of each call that `record` kept, in order.

    A last line that a kill cut off is left out.

    Raises:
        DataError: the file cannot be read, or another line is not a call.
    """
    file = folder / CALLS
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name a folder that contrib.record wrote") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = parse_json(line)
            if not isinstance(row["conversation"], str):
                raise ValueError("a conversation is named by a text")
            yield {key: row[key] for key in ("conversation", "call", "request", "message", "finish_reason")}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}, line {number} is no recorded call; was it edited?") from error
