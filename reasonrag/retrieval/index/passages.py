"""The passages of an index: one file of lines, built row by row from any corpus and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import one_line, printable, valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.corpus import CorpusSource, passage_contents
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.settings import PassagesConfig
from reasonrag.storage.records import Row, RowProblems, text_id

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PASSAGES, OFFSETS, SET_ASIDE = "passages.jsonl", "offsets.bin", "set_aside.jsonl"

_IDS, _CHECKPOINT = "ids.bin", "checkpoint.json"
_NOT_JSON, _NO_CONTENTS, _NO_ID = "not a JSON object", "contents missing or empty", "id missing or empty"
_DUPLICATE, _TOO_LONG = "duplicate id", "longer than {} words, split"
_UNUSABLE = "Repair or remove these rows; a passage has an id of its own and contents (or title and text)."
# A run of more than 100 characters counts as several words: not every script puts blanks between them.
_WORD = re.compile(r"\S{1,100}")
_TITLE_WORDS = 30
_BATCH, _BATCH_CHARS = 1000, 4 << 20  # rows whose ids are looked up together, and characters of them
_as_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder for each line


class PassageStore:
    """Passages by row, read where they lie. Safe to read from several threads."""

    def __init__(self, folder: Path) -> None:
        """Map the finished part `passages` in `folder`: lines of {"id", "contents"}, and `[n + 1]` int64 offsets."""
        import numpy as np

        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        self._offsets = np.asarray(np.memmap(folder / OFFSETS, dtype=np.int64, mode="r"))
        with (folder / PASSAGES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def passage(self, row: int, score: float = 0.0) -> Passage:
        """The passage in a row, 0 <= row < len."""
        document = json.loads(self._lines[int(self._offsets[row]) : int(self._offsets[row + 1])])
        return Passage(document["id"], document["contents"], score)

    def contents(self, start: int, stop: int) -> Iterator[str]:
        """The contents of rows `start` to `stop`, one after another."""
        for row in range(start, min(stop, len(self))):
            yield self.passage(row).contents

    def ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """First and last row (exclusive) of ranges that cover all passages in order.

        None has more than `rows` passages, nor more bytes than `rows` passages of mean size, but for single passages.
        """
        import numpy as np

        size = int(self._offsets[-1]) * rows // len(self)
        start = 0
        while start < len(self):
            fits = int(np.searchsorted(self._offsets, self._offsets[start] + size, side="right")) - 1
            stop = max(start + 1, min(start + rows, fits))
            yield start, stop
            start = stop

    def close(self) -> None:
        """Let go of the file."""
        self._lines.close()


def passages_plan(source: CorpusSource, rules: PassagesConfig) -> Plan:
    """What decides the passages: name and checksum of the corpus, and the rules."""
    return Plan("passages", {"corpus": source.name, "checksum": source.checksum()}, rules.model_dump())


def passages_memory(passages: int) -> dict[str, int]:
    """Bytes that building takes at most, by cause: hashes of ids, three times while runs of them are merged."""
    return {"ids": 24 * passages, "rows": 64 << 20}


def build_passages(
    index: IndexFolder,
    source: CorpusSource,
    rules: PassagesConfig,
    *,
    progress: BuildProgress,
    checkpoint_rows: int = 50_000,
) -> Manifest:
    """Build the part `passages`, if it is not there or damaged, going on where a killed process stopped.

    Call it under `index.locked()`.

    Args:
        index: where to.
        source: the corpus.
        rules: for rows that are no passage and for long passages.
        progress: is told.
        checkpoint_rows: rows between two checkpoints; what a kill loses at most. It does not change the result.

    Raises:
        DataError: the corpus cannot be read or has no passages; under strict rules, rows that cannot be used.
    """
    plan = passages_plan(source, rules)
    if made := index.sound(plan):
        return made
    draft = Draft(index, plan)
    with _Writer(draft, rules) as writer:
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
    """Say what was set aside, or refuse the corpus for it."""
    if rules.strict:
        problems = RowProblems(source.name)
        with (draft.folder / SET_ASIDE).open("rb") as lines:
            for line in lines:
                row = json.loads(line)
                problems.add(row["reason"], row["row"], row["id"] if row["reason"] == _DUPLICATE else None)
        problems.check(_UNUSABLE)
    reasons = {name: count for name, count in counts.items() if name not in ("rows", "passages")}
    found = "; ".join(f"{reason}: {count:,}" for reason, count in reasons.items())
    if not counts["passages"]:
        raise DataError(f"{source.name}: no passages in it{f' ({found}). {_UNUSABLE}' if found else ''}")
    if found:
        progress.note(f"{counts['rows']:,} rows gave {counts['passages']:,} passages. {found}; see {SET_ASIDE}")


class _Writer:
    """The files of the part while they grow, cut back to the last checkpoint when a build goes on."""

    def __init__(self, draft: Draft, rules: PassagesConfig) -> None:
        kept = draft.scratch / _CHECKPOINT
        self._draft = draft
        self._rules = rules
        state: dict[str, Any] = (
            json.loads(kept.read_bytes()) if kept.exists() else {"row": 0, "sizes": {}, "counts": {}}
        )
        self.row = self.saved = state["row"]
        self._counts = Counter[str](state["counts"])
        folders = {PASSAGES: draft.folder, OFFSETS: draft.folder, SET_ASIDE: draft.folder, _IDS: draft.scratch}
        self._files = {name: _opened(folder / name, state["sizes"].get(name, 0)) for name, folder in folders.items()}
        self._end = self._files[PASSAGES].tell()
        if not self._files[OFFSETS].tell():
            self._files[OFFSETS].write(bytes(8))
        self._ids = _Ids(draft.scratch / _IDS)
        self._aside: list[tuple[int, object, str]] = []  # row, id and reason, of the rows being added

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def counts(self) -> dict[str, int]:
        """Rows, passages, and rows by what was wrong with them."""
        return {"rows": self.row, "passages": 0, **dict(sorted(self._counts.items()))}

    def add(self, batch: Sequence[tuple[int, Any]]) -> None:
        """Write the passages of these rows, and set aside what is none."""
        self._aside = []
        found = [(number, pieces) for number, row in batch if (pieces := self._passages(number, row))]
        new, hashes = self._ids.add([piece.id for _, pieces in found for piece in pieces])
        self._files[_IDS].write(hashes)
        is_new = iter(new.tolist())
        for number, pieces in found:
            self._take(number, pieces, list(islice(is_new, len(pieces))))
        for number, row_id, reason in sorted(self._aside, key=lambda entry: entry[0]):
            self._counts[reason] += 1
            self._files[SET_ASIDE].write(_aside_line(number, row_id, reason))
        self.row = batch[-1][0]

    def save(self) -> None:
        """Let a killed process go on from here."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        with self._draft.writing(_CHECKPOINT, scratch=True) as file:
            file.write(json.dumps({"row": self.row, "sizes": sizes, "counts": self._counts}).encode())
        self.saved = self.row

    def _take(self, number: int, pieces: Sequence[Passage], new: Sequence[bool]) -> None:
        """Write the pieces of one row; a row whose own id came before leaves none, however many pieces it has."""
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
        """The pieces of one row; none where it is set aside."""
        given = row.get("id") if isinstance(row, dict) else None
        contents = passage_contents(row) if isinstance(row, dict) else None
        row_id = text_id(given)
        if row_id is None or contents is None:
            reason = _NOT_JSON if not isinstance(row, dict) else _NO_CONTENTS if contents is None else _NO_ID
            self._aside.append((number, given, reason))
            return []
        limit = self._rules.chunk_words or self._rules.max_words
        pieces = [contents] if self._rules.strict else split(contents, limit)
        return [Passage(row_id if i == 1 else f"{row_id}#{i}", piece) for i, piece in enumerate(pieces, 1)]


class _Ids:
    """Which ids came before: 64-bit hashes in sorted runs, 8 bytes a passage.

    Two of 21 million ids share a hash with a chance of 1 to 80,000; the later passage would be set aside.
    """

    def __init__(self, kept: Path) -> None:
        """Begin with the hashes that an earlier attempt left in `kept`."""
        import numpy as np

        hashes = np.sort(np.fromfile(kept, dtype=np.uint64))
        self._runs = [hashes] if len(hashes) else []

    def add(self, ids: Sequence[str]) -> tuple[NDArray[np.bool_], bytes]:
        """`[len(ids)]` whether each id is new, and the hashes of the new ones."""
        import numpy as np

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


def split(contents: str, max_words: int) -> list[str]:
    """Pieces of at most `max_words` words, the title not counted; each begins with the title.

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
    bounds = [(words[i][0], words[min(i + max_words, len(words)) - 1][1]) for i in range(0, len(words), max_words)]
    return [f"{title}{line}{text[start:stop]}" for start, stop in bounds]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in a row: so many, or fewer large ones, so that whole books take no more memory than sentences."""
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
    """The file to write on behind `size` bytes; what stands there already is not known to be whole."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file
