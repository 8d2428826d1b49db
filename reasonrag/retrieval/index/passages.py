"""The passages of an index: one file of lines, built row by row from any corpus, and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import DataError
from reasonrag.core.text import one_line, printable, valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.corpus import CorpusSource, passage_contents
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.settings import PassagesConfig
from reasonrag.storage.files import naming
from reasonrag.storage.records import Row, RowProblems, text_id

PASSAGES, OFFSETS, SET_ASIDE = "passages.jsonl", "offsets.bin", "set_aside.jsonl"

_IDS, _CHECKPOINT = "ids.bin", "checkpoint.json"
_NOT_JSON, _NO_CONTENTS, _NO_ID = "not a JSON object", "contents missing or empty", "id missing or empty"
_DUPLICATE, _TOO_LONG = "duplicate id", "longer than {} words, split"
_UNUSABLE = "Repair or remove these rows; a passage has an id of its own and contents (or title and text)."
# More than 100 characters without a blank count as several words, as not every script separates words.
_WORD = re.compile(r"\S{1,100}")
_TITLE_WORDS = 30
_BATCH, _BATCH_CHARS = 1000, 4 << 20  # most rows whose ids are looked up together, and most of their characters
_as_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder for each line


class PassageStore:
    """Passages by row, read from a memory-mapped file. Safe to read from several threads."""

    def __init__(self, folder: Path) -> None:
        """Memory-map the finished part in `folder`: lines of {"id", "contents"}, and `[n + 1]` int64 offsets."""
        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        self._offsets = np.asarray(np.memmap(folder / OFFSETS, dtype=np.int64, mode="r"))
        with (folder / PASSAGES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def passage(self, row: int, score: float = 0.0) -> Passage:
        """Return the passage in a row, 0 <= row < len."""
        document = json.loads(self._lines[int(self._offsets[row]) : int(self._offsets[row + 1])])
        return Passage(document["id"], document["contents"], score)

    def contents(self, start: int, stop: int) -> Iterator[str]:
        """Yield the contents of rows `start` to `stop`."""
        for row in range(start, min(stop, len(self))):
            yield self.passage(row).contents

    def ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield first and last row (exclusive) of ranges that cover all passages in order.

        A range of several passages has at most `rows` of them, and at most as many bytes as `rows` passages of mean
        size.
        """
        size = int(self._offsets[-1]) * rows // len(self)
        start = 0
        while start < len(self):
            fits = int(np.searchsorted(self._offsets, self._offsets[start] + size, side="right")) - 1
            stop = max(start + 1, min(start + rows, fits))
            yield start, stop
            start = stop

    def close(self) -> None:
        self._lines.close()


def passages_plan(source: CorpusSource, rules: PassagesConfig) -> Plan:
    """Return the plan of the part: name and checksum of the corpus, and the rules."""
    return Plan("passages", {"corpus": source.name, "checksum": source.checksum()}, rules.model_dump())


def passages_memory(passages: int) -> dict[str, int]:
    """Return the bytes that building takes at most, by cause. Hashes of ids count three times, for merging them."""
    return {"ids": 24 * passages, "rows": 64 << 20}


def build_passages(
    index: IndexFolder,
    source: CorpusSource,
    rules: PassagesConfig,
    *,
    progress: BuildProgress,
    checkpoint_rows: int = 50_000,
) -> Manifest:
    """Build the part `passages` if it is missing or damaged. The caller holds the lock of the index.

    A killed build resumes after the last checkpoint; it loses at most `checkpoint_rows` rows of work. The result does
    not depend on them.

    Raises:
        DataError: the corpus cannot be read or has no passages; under strict rules, it has unusable rows.
    """
    plan = passages_plan(source, rules)
    if made := index.sound(plan):
        return made
    draft = Draft(index, plan)
    with naming(draft.folder), closing(_Writer(draft, rules)) as writer:
        progress.start("passages", total=source.total, unit="rows", done=writer.row)
        for batch in _batches(source.rows(writer.row)):
            before = writer.row
            writer.add(batch)
            progress.advance(writer.row - before)
            if writer.row - writer.saved >= checkpoint_rows:
                writer.save()
        writer.save()
        counts = writer.counts
    _report(draft, source, rules, counts, progress)
    return draft.finish(counts)


def _report(
    draft: Draft, source: CorpusSource, rules: PassagesConfig, counts: Mapping[str, int], progress: BuildProgress
) -> None:
    """Report the rows that were set aside; raise for them if the rules are strict."""
    if rules.strict:
        problems = RowProblems(source.name)
        with (draft.folder / SET_ASIDE).open("rb") as lines:
            for line in lines:
                row = json.loads(line)
                problems.add(row["reason"], row["row"], row["id"] if row["reason"] == _DUPLICATE else None)
        problems.check(_UNUSABLE)
    reasons = {name: count for name, count in counts.items() if name not in ("rows", "passages")}
    problem_counts = "; ".join(f"{reason}: {count:,}" for reason, count in reasons.items())
    if not counts["passages"]:
        reason = f" ({problem_counts}). {_UNUSABLE}" if problem_counts else ""
        raise DataError(f"{source.name}: no passages in it{reason}")
    if problem_counts:
        summary = f"{counts['rows']:,} rows gave {counts['passages']:,} passages"
        progress.note(f"{summary}. {problem_counts}; see {SET_ASIDE}")


class _Writer:
    """The growing files of the part. A build that resumes truncates them to the last checkpoint."""

    def __init__(self, draft: Draft, rules: PassagesConfig) -> None:
        self._draft = draft
        self._rules = rules
        state: dict[str, Any] = {"row": 0, "sizes": {}, "counts": {}}
        if draft.holds(_CHECKPOINT, scratch=True):
            state = json.loads((draft.scratch / _CHECKPOINT).read_bytes())
        self.row = self.saved = state["row"]
        self._counts = Counter[str](state["counts"])
        folders = {PASSAGES: draft.folder, OFFSETS: draft.folder, SET_ASIDE: draft.folder, _IDS: draft.scratch}
        self._files = {name: _opened(folder / name, state["sizes"].get(name, 0)) for name, folder in folders.items()}
        self._end = self._files[PASSAGES].tell()
        if not self._files[OFFSETS].tell():
            self._files[OFFSETS].write(bytes(8))
        self._ids = _Ids(draft.scratch / _IDS)
        self._aside: list[tuple[int, object, str]] = []  # row, id and reason, of the rows being added

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rows, of passages, and of rows by problem."""
        return {"rows": self.row, "passages": 0, **dict(sorted(self._counts.items()))}

    def add(self, batch: Sequence[tuple[int, Any]]) -> None:
        """Write the passages of these rows, and set unusable rows aside."""
        self._aside = []
        pieces_by_row = {number: self._passages(number, row) for number, row in batch}
        new, hashes = self._ids.add([piece.id for pieces in pieces_by_row.values() for piece in pieces])
        self._files[_IDS].write(hashes)
        is_new = iter(new.tolist())
        for number, pieces in pieces_by_row.items():
            if pieces:
                self._take(number, pieces, list(islice(is_new, len(pieces))))
        for number, row_id, reason in sorted(self._aside, key=lambda entry: entry[0]):
            self._counts[reason] += 1
            self._files[SET_ASIDE].write(_aside_line(number, row_id, reason))
        self.row = batch[-1][0]

    def save(self) -> None:
        """Write a checkpoint, from which a killed build resumes."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        with self._draft.writing(_CHECKPOINT, scratch=True) as file:
            file.write(json.dumps({"row": self.row, "sizes": sizes, "counts": self._counts}).encode())
        self.saved = self.row

    def _take(self, number: int, pieces: Sequence[Passage], new: Sequence[bool]) -> None:
        """Write the pieces of one row. If the row's own id came before, none of its pieces is written."""
        if not new[0]:
            self._aside.append((number, pieces[0].id, _DUPLICATE))
            return
        if len(pieces) > 1 and self._rules.chunk_words is None:
            self._aside.append((number, pieces[0].id, _TOO_LONG.format(self._rules.max_words)))
        for piece, is_new in zip(pieces, new, strict=True):
            if is_new:
                self._write(piece)
            else:
                self._aside.append((number, piece.id, _DUPLICATE))

    def _write(self, passage: Passage) -> None:
        line = _as_json({"id": passage.id, "contents": passage.contents}).encode() + b"\n"
        self._end += self._files[PASSAGES].write(line)
        self._files[OFFSETS].write(self._end.to_bytes(8, "little"))
        self._counts["passages"] += 1

    def _passages(self, number: int, row: Any) -> list[Passage]:
        """Return the pieces of one row; none if it is set aside."""
        if not isinstance(row, dict):
            self._aside.append((number, None, _NOT_JSON))
            return []
        row_id, contents = text_id(row.get("id")), passage_contents(row)
        if row_id is None or contents is None:
            self._aside.append((number, row.get("id"), _NO_CONTENTS if contents is None else _NO_ID))
            return []
        limit = self._rules.chunk_words or self._rules.max_words
        pieces = [contents] if self._rules.strict else split(contents, limit)
        return [Passage(row_id if i == 1 else f"{row_id}#{i}", piece) for i, piece in enumerate(pieces, 1)]


class _Ids:
    """The ids that came before, as 64-bit hashes in sorted runs: 8 bytes per passage.

    The chance that two of 21 million ids share a hash is 1 in 80,000. The later passage would then be set aside.
    """

    def __init__(self, kept: Path) -> None:
        """Start with the hashes that an earlier attempt wrote to `kept`."""
        hashes = np.sort(np.fromfile(kept, dtype=np.uint64))
        self._runs = [hashes] if len(hashes) else []

    def add(self, ids: Sequence[str]) -> tuple[NDArray[np.bool_], bytes]:
        """Return `[len(ids)]` booleans, whether each id is new, and the hashes of the new ones."""
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in ids)
        hashes = np.frombuffer(digests, dtype="<u8").astype(np.uint64)
        new = np.zeros(len(ids), dtype=bool)
        new[np.unique(hashes, return_index=True)[1]] = True
        for run in self._runs:
            new &= run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] != hashes
        if new.any():
            self._runs.append(np.sort(hashes[new]))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]
        return new, hashes[new].tobytes()


def save_array(file: IO[bytes], values: NDArray[Any]) -> None:
    """Write what `np.save` writes; its error on a full disk does not say why."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
    file.write(values.data)


def split(contents: str, max_words: int) -> list[str]:
    """Split a text into pieces of at most `max_words` words. Each begins with the title, which is not counted.

    >>> split("Jaws\\nA film of 1975 about a shark", 4)
    ['Jaws\\nA film of 1975', 'Jaws\\nabout a shark']
    """
    if len(contents) < 2 * max_words:
        return [contents]
    title, line, text = contents.partition("\n")
    if not text.strip() or len(title.split()) > _TITLE_WORDS:
        title, line, text = "", "", contents
    words = [word.span() for word in _WORD.finditer(text)]
    if len(words) <= max_words:
        return [contents]
    pieces = []
    for first in range(0, len(words), max_words):
        last = min(first + max_words, len(words)) - 1
        start, stop = words[first][0], words[last][1]
        pieces.append(f"{title}{line}{text[start:stop]}")
    return pieces


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group rows by number or, if they are long, by characters, so that whole books take no more memory."""
    batch: list[Row] = []
    chars = 0
    for number, row in rows:
        batch.append((number, row))
        chars += sum(len(value) for value in row.values() if isinstance(value, str)) if isinstance(row, dict) else 0
        if len(batch) == _BATCH or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _aside_line(number: int, row_id: object, reason: str) -> bytes:
    shown = None if row_id is None else printable(one_line(valid_unicode(str(row_id))))[:200]
    return _as_json({"row": number, "id": shown, "reason": reason}).encode() + b"\n"


def _opened(path: Path, size: int) -> IO[bytes]:
    """Open a file for appending after `size` bytes, and drop the rest, which may be incomplete."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file
