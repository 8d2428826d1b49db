"""From a corpus (files, a folder, a data set on the Hub, a well-known name) to passages: one memory-mapped file.

Rows are read one at a time, never all at once. A build that is killed here reads the corpus again from the start, which
takes minutes for Wikipedia.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import json
import mmap
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import structlog
from numpy.typing import NDArray

from reasonrag.core.errors import DataError
from reasonrag.core.event_loop import end_on_bus_error
from reasonrag.core.settings import named_path, nearest
from reasonrag.core.text import one_line, printable, quoted, valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.index import BuildProgress, Draft, IndexFolder, Manifest, PassagesConfig, Plan
from reasonrag.storage.files import size_and_digest
from reasonrag.storage.inputs import (
    SUFFIXES,
    NumberedRow,
    RowProblems,
    lack,
    missing_shards,
    raw_rows,
    text_id,
    warn_left_out,
)
from reasonrag.storage.questions import load_questions, paragraph_corpus

log = structlog.get_logger()

# Address and number of passages by name. wiki18 is the English
# Wikipedia of December 2018 in passages of 100 words
# (arXiv:2004.04906), the file that FlashRAG and Search-R1 search in.
KNOWN_CORPORA: Mapping[str, tuple[str, int]] = {
    "wiki18": ("hub:PeterJinGo/wiki-18-corpus:wiki-18.jsonl.gz", 21_015_324)
}
# Data sets with questions that carry paragraphs, which together are the corpus.
PARAGRAPH_CORPORA = ("hotpotqa", "2wikimultihopqa", "musique")
PASSAGES, OFFSETS, SET_ASIDE = "passages.jsonl", "offsets.bin", "set_aside.jsonl"

_TEXTS = (".txt", ".md")
_HIDDEN = re.compile(r"(^|/)(\.|~\$)")  # also what Office locks
_HUB = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?:(?P<file>.+)")
_DUPLICATE = "duplicate id"
_UNUSABLE = "Repair or remove these rows; a passage has a unique id, and contents (or title and text)."
# More than 100 characters without a blank count as several words, as not every script separates words.
# Chinese and Japanese are written without spaces: there each character is a word, as in Lucene's standard analyzer.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]{{1,100}}")
_TITLE_WORDS = 30
_QUERY_WORDS = 8
_RECENT_IDS = 1 << 20
_as_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder for each line


# --- Corpora ---


@dataclass(frozen=True)
class FileCorpus:
    """Files that are read one after another.

    A file that ends in one of `SUFFIXES` holds rows; one in `_TEXTS` is a text, which is one row, with
    its name as title and its path in the folder as id.
    """

    name: str  # without folders
    files: Sequence[Path]
    folder: Path | None = None  # of several files, or of texts: names in the checksum are relative to it
    commit: str = ""  # of a file of the Hub: its checksum
    total: int | None = None  # number of rows, if it is known before they are read

    def checksum(self) -> str:
        """Return the commit, else the SHA-256 of the file's bytes; of names and checksums if there are several."""
        if self.commit:
            return self.commit
        try:
            self._before  # noqa: B018 -- computed once
            digests = [size_and_digest(path)[1] for path in self.files]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from None
        if self.folder is None:
            return digests[0]
        names = [path.relative_to(self.folder).as_posix() for path in self.files]
        return hashlib.sha256(json.dumps([names, digests]).encode()).hexdigest()

    def _times(self) -> list[tuple[int, int]]:
        return [(at.st_size, at.st_mtime_ns) for at in map(Path.stat, self.files)]

    _before = functools.cached_property(_times)

    def rows(self) -> Iterator[NumberedRow]:
        """Yield all rows; raise DataError if a file has changed since `checksum`, as one that grows."""
        rows_before, before = 0, self._before
        for path in self.files:
            number = 0
            for number, row in self._text(path) if path.name.lower().endswith(_TEXTS) else raw_rows(path):
                yield rows_before + number, row
            rows_before += number
        if self._times() != before:
            raise DataError(f"{self.name} changed while it was read; run the command again once it is whole")

    def _text(self, path: Path) -> Iterator[NumberedRow]:
        """Yield {"id", "title", "text"} of a text in UTF-8, in UTF-16 with its mark, or else in Windows-1252."""
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            text = raw.decode("utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
        except UnicodeDecodeError:
            log.warning("a text is not UTF-8; it is read as Windows-1252", file=path.name)
            text = raw.decode("cp1252", "replace")
        name = path.name if self.folder is None else path.relative_to(self.folder).as_posix()
        yield 1, {"id": name, "title": path.stem, "text": text}


@dataclass(frozen=True)
class GivenCorpus:
    """Passages that are in memory; their ids and contents are the checksum."""

    name: str
    passages: Sequence[Passage]

    @property
    def total(self) -> int:
        return len(self.passages)

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for passage in self.passages:
            digest.update(json.dumps([passage.id, passage.contents]).encode() + b"\n")
        return digest.hexdigest()

    def rows(self) -> Iterator[NumberedRow]:
        for number, passage in enumerate(self.passages, 1):
            yield number, {"id": passage.id, "contents": passage.contents}


CorpusSource = FileCorpus | GivenCorpus


def open_corpus(spec: str) -> CorpusSource:
    """Open a corpus by file, folder, address on the Hub or name. Rows have id and contents, or id, title and text.

    It is a file that ends in one of `SUFFIXES`; a folder of such files, or of
    .txt and .md files; `hub:OWNER/NAME[@REVISION]:FILE`, a file of a data
    set; a name of `KNOWN_CORPORA`; or `hotpotqa`, `2wikimultihopqa`,
    `musique` (also with `:SPLIT`): the paragraphs that their questions carry.

    Raises:
        DataError: the corpus does not exist, or the Hub cannot be used.
    """
    path = named_path(spec)
    if spec.startswith("hub:"):
        return _open_hub(spec)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file() or spec.lower().endswith(SUFFIXES):
        if not path.exists():
            raise DataError(f"{path}: file not found")
        return FileCorpus(path.name, [path])
    if spec in KNOWN_CORPORA:
        hub, passages = KNOWN_CORPORA[spec]
        return _open_hub(hub, name=spec, total=passages)
    name, _, split = spec.partition(":")
    if name in PARAGRAPH_CORPORA:
        return GivenCorpus(spec, paragraph_corpus(load_questions(name, split=split or None)))
    known = nearest(spec, [*KNOWN_CORPORA, *PARAGRAPH_CORPORA])
    raise DataError(
        f"corpus {quoted(spec)} is neither a file nor a folder nor a known name{known}; also hub:OWNER/NAME:FILE, a "
        f"folder, or a path that ends in {', '.join(SUFFIXES)}"
    )


def _open_folder(folder: Path) -> CorpusSource:
    """Open the files with rows in a folder, else its texts; hidden files and folders are ignored."""
    visible = [path for path in sorted(folder.rglob("*")) if not _HIDDEN.search(path.relative_to(folder).as_posix())]
    files = [path for path in visible if path.is_file()]
    name = valid_unicode(folder.resolve().name)
    for suffixes in (SUFFIXES, _TEXTS):
        if chosen := [path for path in files if path.name.lower().endswith(suffixes)]:
            warn_left_out(folder, visible, set(chosen))
            if problem := missing_shards(chosen):
                log.warning(f"{folder}: {problem}; the others are missing in this corpus")
            return FileCorpus(name, chosen, folder, total=len(chosen) if suffixes == _TEXTS else None)
    raise DataError(f"{folder}: no corpus in it; a folder needs files that end in {', '.join((*SUFFIXES, *_TEXTS))}")


def _open_hub(spec: str, *, name: str | None = None, total: int | None = None) -> CorpusSource:
    address = _HUB.fullmatch(spec)
    if address is None or not address["file"].lower().endswith(SUFFIXES):
        raise DataError(f"corpus {quoted(spec)}: write hub:OWNER/NAME:FILE or hub:OWNER/NAME@REVISION:FILE")
    repository, file, revision = address["repository"], address["file"], address["revision"]
    import huggingface_hub

    try:
        # .../snapshots/COMMIT/FILE
        path = Path(huggingface_hub.hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except Exception as error:  # several libraries raise their own types
        raise DataError(
            f"corpus {quoted(spec)} has to be fetched from the Hub, which cannot be used ({type(error).__name__}: "
            f"{quoted(error)}); download it and give the file, set HF_HUB_OFFLINE=1 to read a cached copy, or try again"
        ) from error
    commit = f"{path.parts[-1 - len(Path(file).parts)]}:{file}"
    return FileCorpus(name or f"hub:{repository}@{commit}", [path], commit=commit, total=total)


def passage_contents(row: Mapping[str, Any]) -> str | None:
    """Return the `contents` of a passage, else its `title` and `text` joined, or None without a text."""
    contents, title, text = row.get("contents"), row.get("title"), row.get("text")
    if not isinstance(contents, str) and isinstance(text, str) and text.strip():
        contents = f"{one_line(str(title))}\n{text}" if isinstance(title, str | int) and str(title).strip() else text
    return valid_unicode(contents) if isinstance(contents, str) and contents.strip() else None


# --- The part `passages` of an index ---


class PassageStore:
    """Passages by row, read from a memory-mapped file. Safe to read from several threads."""

    def __init__(self, index: IndexFolder) -> None:
        """Memory-map the part `passages`: lines of {"id", "contents"}, and `[n + 1]` int64 offsets."""
        end_on_bus_error()
        folder = index.part("passages")
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

        A range of several passages has at most `rows` of them,
        and at most as many bytes as `rows` passages of mean size.
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
    index: IndexFolder, source: CorpusSource, rules: PassagesConfig, *, progress: BuildProgress
) -> Manifest:
    """Build the part `passages` if it is missing or damaged. The caller holds the lock of the index.

    Raises:
        DataError: the corpus cannot be read or has no passages; under strict rules, it has unusable rows.
    """
    plan = passages_plan(source, rules)
    if manifest := index.sound(plan):
        return manifest
    draft = Draft(index, plan)
    with contextlib.ExitStack() as opened:
        files = {name: opened.enter_context(draft.writing(name)) for name in (PASSAGES, OFFSETS, SET_ASIDE)}
        writer = _Writer(source.name, files)
        progress.start("passages", total=source.total, unit="rows")
        for number, row in source.rows():
            writer.add(number, row, rules)
            progress.advance()
    if rules.strict:
        writer.problems.check(_UNUSABLE)
    set_aside = writer.problems.counts
    reasons = "; ".join(f"{reason}: {rows:,}" for reason, rows in sorted(set_aside.items()))
    if not writer.passages:
        raise DataError(f"{source.name}: no passages in it" + (f" ({reasons}). {_UNUSABLE}" if reasons else ""))
    if reasons:
        progress.note(f"{writer.rows:,} rows gave {writer.passages:,} passages. {reasons}; see {SET_ASIDE}")
    return draft.finish({"rows": writer.rows, "passages": writer.passages, **set_aside})


class _Writer:
    """Writes the files of the part, row after row, and counts."""

    def __init__(self, corpus: str, files: Mapping[str, IO[bytes]]) -> None:
        self._files, self.problems = files, RowProblems(corpus)
        self.row = self.rows = self.passages = self._end = 0
        self._ids = _Ids()
        files[OFFSETS].write(bytes(8))

    def add(self, number: int, row: Any, rules: PassagesConfig) -> None:
        """Write the passages of a row, or set it aside."""
        self.row = number
        self.rows += 1
        if not isinstance(row, dict):
            self._set_aside(None, "not a JSON object")
            return
        row_id, contents = text_id(row.get("id")), passage_contents(row)
        if row_id is None or contents is None:
            problem = "contents missing or empty" if contents is None else lack("id", row.get("id"))
            self._set_aside(row.get("id"), problem)
            return
        pieces = [contents] if rules.strict else split(contents, rules.chunk_words or rules.max_words)
        if not self._write(row_id, pieces[0]):
            return
        if len(pieces) > 1 and rules.chunk_words is None:
            self._set_aside(row_id, f"longer than {rules.max_words} words, split")
        for piece_number, piece in enumerate(pieces[1:], 2):
            self._write(f"{row_id}#{piece_number}", piece)

    def _write(self, passage_id: str, contents: str) -> bool:
        """Write a passage, or set it aside if its id came before; return whether it was written."""
        digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
        if not self._ids.add(int.from_bytes(digest, "little")):
            self._set_aside(passage_id, _DUPLICATE)
            return False
        self._end += self._files[PASSAGES].write(_as_json({"id": passage_id, "contents": contents}).encode() + b"\n")
        self._files[OFFSETS].write(self._end.to_bytes(8, "little"))
        self.passages += 1
        return True

    def _set_aside(self, row_id: object, reason: str) -> None:
        shown = None if row_id is None else printable(one_line(valid_unicode(str(row_id))))[:200]
        self._files[SET_ASIDE].write(_as_json({"row": self.row, "id": shown, "reason": reason}).encode() + b"\n")
        self.problems.add(reason, self.row, shown if reason == _DUPLICATE else None)


class _Ids:
    """The ids that came before, as 64-bit hashes: 16 bytes per passage while they are merged, else 8.

    The chance that two of 21 million ids share a hash is 1
    in 80,000. The later passage would then be set aside.
    """

    def __init__(self) -> None:
        self._sorted: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._recent: set[int] = set()

    def add(self, hash_: int) -> bool:
        """Add a hash; return whether it is new."""
        position = int(np.searchsorted(self._sorted, np.uint64(hash_)))
        if hash_ in self._recent or (position < len(self._sorted) and int(self._sorted[position]) == hash_):
            return False
        self._recent.add(hash_)
        # A set takes some 60 bytes an id, a sorted array 8, but is slow to grow.
        if len(self._recent) == _RECENT_IDS:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True


def split(contents: str, max_words: int) -> list[str]:
    """Split a text into pieces of at most `max_words` words. Each begins with the title, which is not counted.

    >>> split("Jaws\\nA film of 1975 about a shark", 4)
    ['Jaws\\nA film of 1975', 'Jaws\\nabout a shark']
    """
    if len(contents) <= max_words:
        return [contents]
    title, line, text = contents.partition("\n")
    if not text.strip() or len(title.split()) > _TITLE_WORDS:
        title, line, text = "", "", contents
    words = list(_WORD.finditer(text))
    if len(words) <= max_words:
        return [contents]
    groups = (words[first : first + max_words] for first in range(0, len(words), max_words))
    return [f"{title}{line}{text[group[0].start() : group[-1].end()]}" for group in groups]


def self_queries(store: PassageStore, count: int) -> list[str]:
    """Draw queries from an index's own passages: at most 8 words in a row of each of `count` passages.

    All passages are taken if there are fewer. The same index gives the same queries.
    """
    draw = random.Random(0)
    queries = []
    for row in draw.sample(range(len(store)), min(count, len(store))):
        words = store.passage(row).contents.split()
        start = draw.randrange(max(len(words) - _QUERY_WORDS, 0) + 1)
        queries.append(" ".join(words[start : start + _QUERY_WORDS]))
    return queries
