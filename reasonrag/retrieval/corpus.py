"""Corpus files: FlashRAG's `id` and `contents`, read one passage at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrag.errors import DataError
from reasonrag.questions import RowProblems, read_rows, text_id
from reasonrag.text import one_line, valid_unicode
from reasonrag.types import Passage


def read_corpus(path: Path | str) -> Iterator[Passage]:
    """The passages of a .jsonl, .jsonl.gz, .json or .parquet file with columns id and contents, or id, title and text.

    Raises:
        DataError: at once where the file cannot be read; at the end, after the last good passage, where rows have
            no contents, no id, an id that came before, or are not JSON. A reader that keeps what it was given has to
            read to the end first.
    """
    path = Path(path)
    problems = RowProblems(str(path))
    seen: set[str] = set()
    for number, row in read_rows(path, problems):
        row_id, contents = text_id(row.get("id")), passage_contents(row)
        if contents is None:
            problems.add("contents missing or empty", number)
        elif row_id is None:
            problems.add("id missing or empty", number)
        elif row_id in seen:
            problems.add("duplicate id", number, row_id)
        else:
            seen.add(row_id)
            yield Passage(row_id, contents)
    problems.check("Repair or remove these rows; a passage has an id of its own and contents (or title and text).")
    if not seen:
        raise DataError(f"{path}: no passages in it")


def passage_contents(row: Mapping[str, Any]) -> str | None:
    """The `contents` of a passage, or its `title` and `text` put together, or None where there is no text."""
    contents, title, text = row.get("contents"), row.get("title"), row.get("text")
    if not isinstance(contents, str) and isinstance(text, str) and text.strip():
        contents = f"{one_line(title)}\n{text}" if isinstance(title, str) else text
    return valid_unicode(contents) if isinstance(contents, str) and contents.strip() else None


def corpus_checksum(path: Path | str) -> str:
    """SHA-256 of the file's bytes, in hex.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
