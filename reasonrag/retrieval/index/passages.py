"""The passages of an index: one file of lines, built row by row from any corpus, and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
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
from reasonrag.storage.records import RowProblems, text_id

PASSAGES, OFFSETS, SET_ASIDE = "passages.jsonl", "offsets.bin", "set_aside.jsonl"

_IDS, _CHECKPOINT = "ids.bin", "checkpoint.json"
_DUPLICATE = "duplicate id"
_UNUSABLE = "Repair or remove these rows; a passage has a unique id, and contents (or title and text)."
# More than 100 characters without a blank count as several words, as not every script separates words.
_WORD = re.compile(r"\S{1,100}")
_TITLE_WORDS = 30
_RECENT_IDS = 1 << 20
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
    if manifest := index.sound(plan):
        return manifest
    draft = Draft(index, plan)
    with naming(draft.folder), closing(_Writer(draft)) as writer:
        progress.start("passages", total=source.total, unit="rows", done=writer.row)
        for number, row in source.rows(writer.row):
            writer.add(number, row, rules)
            progress.advance()
            if number % checkpoint_rows == 0:
                writer.save()
        writer.save()
        counts = {"rows": writer.row, "passages": 0, **writer.counts}
    if rules.strict:
        problems = RowProblems(source.name)
        for line in (draft.folder / SET_ASIDE).read_bytes().splitlines():
            row = json.loads(line)
            problems.add(row["reason"], row["row"], row["id"] if row["reason"] == _DUPLICATE else None)
        problems.check(_UNUSABLE)
    _report(source, counts, progress)
    return draft.finish(counts)


def _report(source: CorpusSource, counts: Mapping[str, int], progress: BuildProgress) -> None:
    reasons = sorted(set(counts) - {"rows", "passages"})
    problems = "; ".join(f"{reason}: {counts[reason]:,}" for reason in reasons)
    if not counts["passages"]:
        raise DataError(f"{source.name}: no passages in it" + (f" ({problems}). {_UNUSABLE}" if problems else ""))
    if problems:
        summary = f"{counts['rows']:,} rows gave {counts['passages']:,} passages"
        progress.note(f"{summary}. {problems}; see {SET_ASIDE}")


class _Writer:
    """The growing files of the part. A build that resumes truncates them to the last checkpoint."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        state: dict[str, Any] = {"row": 0, "sizes": {}, "counts": {}}
        if draft.holds(_CHECKPOINT, scratch=True):
            state = json.loads((draft.scratch / _CHECKPOINT).read_bytes())
        self.row = state["row"]
        self.counts = Counter[str](state["counts"])  # passages, and rows by problem
        self._files: dict[str, IO[bytes]] = {}
        for name in (PASSAGES, OFFSETS, SET_ASIDE, _IDS):
            path = (draft.scratch if name == _IDS else draft.folder) / name
            file = self._files[name] = path.open("r+b" if path.exists() else "w+b")
            # What follows the checkpoint may be incomplete.
            file.truncate(state["sizes"].get(name, 0))
            file.seek(0, os.SEEK_END)
        self._end = self._files[PASSAGES].tell()
        if not self._files[OFFSETS].tell():
            self._files[OFFSETS].write(bytes(8))
        self._ids = _Ids(np.fromfile(draft.scratch / _IDS, dtype=np.uint64))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def add(self, number: int, row: Any, rules: PassagesConfig) -> None:
        """Write the passages of a row, or set it aside."""
        self.row = number
        fields = row if isinstance(row, dict) else {}
        row_id, contents = text_id(fields.get("id")), passage_contents(fields)
        if row_id is None or contents is None:
            reason = "contents missing or empty" if contents is None else "id missing or empty"
            self._set_aside(number, fields.get("id"), reason if isinstance(row, dict) else "not a JSON object")
            return
        if not self._is_new(row_id):
            self._set_aside(number, row_id, _DUPLICATE)
            return
        pieces = [contents] if rules.strict else split(contents, rules.chunk_words or rules.max_words)
        if len(pieces) > 1 and rules.chunk_words is None:
            self._set_aside(number, row_id, f"longer than {rules.max_words} words, split")
        self._write(Passage(row_id, pieces[0]))
        for piece_number, piece in enumerate(pieces[1:], 2):
            piece_id = f"{row_id}#{piece_number}"
            if self._is_new(piece_id):
                self._write(Passage(piece_id, piece))
            else:
                self._set_aside(number, piece_id, _DUPLICATE)

    def save(self) -> None:
        """Write a checkpoint, from which a killed build resumes."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        with self._draft.writing(_CHECKPOINT, scratch=True) as file:
            file.write(json.dumps({"row": self.row, "sizes": sizes, "counts": self.counts}).encode())

    def _is_new(self, passage_id: str) -> bool:
        digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
        is_new = self._ids.add(int.from_bytes(digest, "little"))
        if is_new:
            self._files[_IDS].write(digest)
        return is_new

    def _write(self, passage: Passage) -> None:
        line = _as_json({"id": passage.id, "contents": passage.contents}).encode() + b"\n"
        self._end += self._files[PASSAGES].write(line)
        self._files[OFFSETS].write(self._end.to_bytes(8, "little"))
        self.counts["passages"] += 1

    def _set_aside(self, number: int, row_id: object, reason: str) -> None:
        shown = None if row_id is None else printable(one_line(valid_unicode(str(row_id))))[:200]
        line = _as_json({"row": number, "id": shown, "reason": reason}).encode() + b"\n"
        self._files[SET_ASIDE].write(line)
        self.counts[reason] += 1


class _Ids:
    """The ids that came before, as 64-bit hashes: 16 bytes per passage while they are merged, else 8.

    The chance that two of 21 million ids share a hash is 1 in 80,000. The later passage would then be set aside.
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._sorted = np.sort(hashes)
        self._recent: set[int] = set()

    def add(self, hash_: int) -> bool:
        """Add a hash; return whether it is new."""
        position = int(np.searchsorted(self._sorted, np.uint64(hash_)))
        if hash_ in self._recent or (position < len(self._sorted) and int(self._sorted[position]) == hash_):
            return False
        self._recent.add(hash_)
        if len(self._recent) == _RECENT_IDS:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True


def save_array(file: IO[bytes], values: NDArray[Any]) -> None:
    """Write what `np.save` writes; its error on a full disk does not name the reason."""
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
