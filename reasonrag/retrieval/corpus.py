"""Corpora: files, folders, data sets on the Hub, and well-known names; read one row at a time."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from reasonrag.core.errors import DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import one_line, quoted, valid_unicode
from reasonrag.core.types import Passage
from reasonrag.storage.files import size_and_digest
from reasonrag.storage.questions import load_questions, paragraph_corpus
from reasonrag.storage.records import SUFFIXES, Row, raw_rows

# Address and number of passages by name. wiki18 is the English Wikipedia of December 2018 in passages of 100 words
# (arXiv:2004.04906), the file that FlashRAG and Search-R1 search in.
KNOWN_CORPORA: Mapping[str, tuple[str, int]] = {
    "wiki18": ("hub:PeterJinGo/wiki-18-corpus:wiki-18.jsonl.gz", 21_015_324),
}
# Data sets with questions that carry paragraphs, which together are the corpus.
PARAGRAPH_CORPORA = ("hotpotqa", "2wikimultihopqa", "musique")

_TEXTS = (".txt", ".md")
_HUB = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?:(?P<file>.+)")


class CorpusSource(Protocol):
    """The rows of a corpus, in an order that never changes."""

    name: str  # without folders
    total: int | None  # number of rows, if it is known before they are read

    def checksum(self) -> str:
        """Return what changes with the content: SHA-256 in hex, or the Hub's commit.

        Raises:
            DataError: the corpus cannot be read.
        """
        ...

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Yield the 1-based number and the value of each row after row `start`; None if it is not JSON.

        Raises:
            DataError: the corpus cannot be read to its end.
        """
        ...


class FileCorpus:
    """Files that are read one after another.

    A .jsonl(.gz, .zst), .json or .parquet file holds rows. Any other is a text, which is one row, with the file's name
    as title and its path in the folder as id.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        *,
        folder: Path | None = None,
        checksum: str | None = None,
        total: int | None = None,
    ) -> None:
        """Name the files, in order; nothing is read yet.

        Several files, or texts, have to be in `folder`: names in the checksum are relative to it. A checksum and a
        number of rows that are known already are not computed.
        """
        self.name = name
        self.total = total
        self._files = files
        self._folder = folder
        self._checksum = checksum
        self._summed: list[tuple[int, int]] | None = None  # sizes and modification times when it was computed

    def checksum(self) -> str:
        """Return the SHA-256 of the file's bytes; of names and checksums if there are several files."""
        if self._checksum is None:
            self._summed = self._stamps()
            self._checksum = _checksum(self._files, self._folder)
        return self._checksum

    def rows(self, start: int = 0) -> Iterator[Row]:
        rows_before = 0
        for path in self._files:
            skipped = max(0, start - rows_before)
            rows = raw_rows(path, skipped) if path.name.lower().endswith(SUFFIXES) else self._text(path, skipped)
            while True:
                try:
                    number, row = next(rows)
                except StopIteration as end:
                    rows_before += end.value
                    break
                yield rows_before + number, row
        if self._summed is not None and self._summed != self._stamps():
            raise DataError(
                f"{self.name}: changed while it was read; run the same command again when it no longer changes"
            )

    def _text(self, path: Path, start: int) -> Generator[Row, None, int]:
        """Yield {"id", "title", "text"}; bytes that are not UTF-8 are replaced."""
        if self._folder is not None and start == 0:
            try:
                text = path.read_text(encoding="utf-8-sig", errors="replace")
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from None
            yield 1, {"id": path.relative_to(self._folder).as_posix(), "title": path.stem, "text": text}
        return 1

    def _stamps(self) -> list[tuple[int, int]]:
        stats = [path.stat() for path in self._files if path.exists()]
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


class GivenCorpus:
    """Passages that are in memory; their ids and contents are the checksum."""

    def __init__(self, name: str, passages: Sequence[Passage]) -> None:
        self.name = name
        self.total: int | None = len(passages)
        self._passages = passages

    def checksum(self) -> str:
        digest = hashlib.sha256()
        for passage in self._passages:
            digest.update(json.dumps([passage.id, passage.contents]).encode() + b"\n")
        return digest.hexdigest()

    def rows(self, start: int = 0) -> Iterator[Row]:
        for number, passage in enumerate(self._passages[start:], start + 1):
            yield number, {"id": passage.id, "contents": passage.contents}


def open_corpus(spec: str) -> CorpusSource:
    """Open a corpus by file, folder, address on the Hub or name. Rows have id and contents, or id, title and text.

    It is a .jsonl(.gz, .zst), .json or .parquet file; a folder of such files, or of .txt and .md files;
    `hub:OWNER/NAME[@REVISION]:FILE`, a file of a data set; a name of `KNOWN_CORPORA`; or `hotpotqa`, `2wikimultihopqa`,
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
    names = [*KNOWN_CORPORA, *PARAGRAPH_CORPORA]
    nearest = difflib.get_close_matches(spec, names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise DataError(
        f"corpus {quoted(spec)} is neither a file nor a folder nor a known name; {hint}known: {', '.join(names)}, "
        f"hub:OWNER/NAME:FILE, a folder, or a path that ends in {', '.join(SUFFIXES)}"
    )


def passage_contents(row: Mapping[str, Any]) -> str | None:
    """Return the `contents` of a passage, else its `title` and `text` joined, or None without a text."""
    contents, title, text = row.get("contents"), row.get("title"), row.get("text")
    if not isinstance(contents, str) and isinstance(text, str) and text.strip():
        contents = f"{one_line(str(title))}\n{text}" if isinstance(title, str | int) else text
    return valid_unicode(contents) if isinstance(contents, str) and contents.strip() else None


def _open_folder(folder: Path) -> CorpusSource:
    """Open the files with rows in a folder, else its texts; hidden files and folders are ignored."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    name = valid_unicode(folder.resolve().name)
    rows = [folder / path for path in visible if path.name.lower().endswith(SUFFIXES)]
    texts = [folder / path for path in visible if path.name.lower().endswith(_TEXTS)]
    if rows:
        return FileCorpus(name, rows, folder=folder)
    if texts:
        return FileCorpus(name, texts, folder=folder, total=len(texts))
    raise DataError(f"{folder}: no corpus in it; a folder needs files that end in {', '.join((*SUFFIXES, *_TEXTS))}")


def _open_hub(spec: str, *, name: str | None = None, total: int | None = None) -> CorpusSource:
    address = _HUB.fullmatch(spec)
    if address is None or not address["file"].lower().endswith(SUFFIXES):
        raise DataError(f"corpus {quoted(spec)}: write hub:OWNER/NAME:FILE or hub:OWNER/NAME@REVISION:FILE")
    repository, file = address["repository"], address["file"]
    import huggingface_hub

    try:
        path = Path(
            huggingface_hub.hf_hub_download(repository, file, repo_type="dataset", revision=address["revision"])
        )
    except Exception as error:  # several libraries raise their own types
        reason = f"{type(error).__name__}: {quoted(error)}"
        raise DataError(
            f"corpus {quoted(spec)} has to be fetched from the Hub, which cannot be used ({reason}); download it and "
            "give the file, set HF_HUB_OFFLINE=1 to read a cached copy, or try again"
        ) from error
    commit = path.parts[-1 - len(Path(file).parts)]  # .../snapshots/COMMIT/FILE
    checksum = f"{commit}:{file}"
    return FileCorpus(name or f"hub:{repository}@{checksum}", [path], checksum=checksum, total=total)


def _checksum(files: Sequence[Path], folder: Path | None) -> str:
    """Return the SHA-256 of one file, or of the names and checksums of the files of a folder."""
    digests = []
    for path in files:
        try:
            digests.append(size_and_digest(path)[1])
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if folder is None:
        return digests[0]
    names = [path.relative_to(folder).as_posix() for path in files]
    return hashlib.sha256(json.dumps([names, digests]).encode()).hexdigest()
