"""BM25 in this process: a bm25s index that is built once and memory-mapped ever after."""

from __future__ import annotations

import array
import asyncio
import hashlib
import json
import mmap
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reasonrag.errors import ConfigError, DataError
from reasonrag.retrieval.corpus import corpus_checksum, read_corpus
from reasonrag.text import valid_unicode
from reasonrag.types import Passage

_LAYOUT = 1  # of the cache folder: raise it when what is written there changes
_MANIFEST, _PASSAGES, _OFFSETS = "manifest.json", "passages.jsonl", "offsets.bin"
_SMALL = 1 << 20  # bytes; larger files are checked by size alone, so that opening stays quick
# Words of one letter count: without them "U.S." or "Malcolm X" would search for less than they say, or for nothing.
_TOKEN = r"(?u)\w+"


@dataclass(frozen=True, slots=True)
class BM25Settings:
    """How words are cut and weighed.

    Args:
        stemmer: a Snowball language of PyStemmer, or None to leave words as they are.
        stopwords: a list that bm25s knows by name, or None to keep all words.
        k1: how slowly repeated words saturate.
        b: in [0, 1], how much long passages are held back.
    """

    stemmer: str | None = "english"
    stopwords: str | None = "english"
    k1: float = 1.2
    b: float = 0.75


class BM25Retriever:
    """Okapi BM25 as Lucene computes it, over a corpus of any size. Accents and case do not matter."""

    def __init__(self, folder: Path, key: str, settings: BM25Settings) -> None:
        """Map the finished index in `folder`; `open` is what finds or builds one."""
        import bm25s
        import numpy as np

        self._key = key
        self._tokenizer = _Tokenizer(settings)
        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        self._index.scores |= {name: np.asarray(self._index.scores[name]) for name in ("data", "indices", "indptr")}
        self._offsets = np.memmap(folder / _OFFSETS, dtype=np.int64, mode="r")
        with (folder / _PASSAGES).open("rb") as file:
            self._passages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bm25")

    @classmethod
    def open(
        cls,
        corpus: Path | Sequence[Passage],
        *,
        cache: Path,
        stemmer: str | None = "english",
        stopwords: str | None = "english",
        k1: float = 1.2,
        b: float = 0.75,
    ) -> BM25Retriever:
        """The index of a corpus file or of given passages, from `cache` if it is there and whole, else built now.

        Several processes may open the same one at once; a damaged folder is built again.

        Raises:
            DataError: a corpus that cannot be read or holds no words, or a cache folder that cannot be written.
        """
        settings = BM25Settings(stemmer, stopwords, k1, b)
        key = _key(corpus, settings)
        folder = cache / f"bm25-{key}"
        # Another process may put its own index in place, or a damaged one aside, between any two of these lines.
        for _ in range(3):
            if _whole(folder, key):
                try:
                    return cls(folder, key, settings)
                except FileNotFoundError:
                    continue
            try:
                _build(corpus, folder, key, settings)
            except OSError as error:
                raise DataError(f"the BM25 index cannot be written to {cache} ({error.strerror or error})") from error
        raise DataError(f"the BM25 index in {folder} is damaged again right after it was built; check that disk")

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the corpus, the settings, and the versions that build the index."""
        return self._key

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings of at most `top_k` passages that share a word with the query, best first.

        Equal scores stand in the order of the corpus, so a query gets the same ranking alone and among others.
        """
        # One thread: numpy holds the GIL for most of this, a second one would only add to the wait.
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, list(queries), top_k)

    async def aclose(self) -> None:
        """Wait for the search in progress, then let go of thread and files."""
        await asyncio.to_thread(self._thread.shutdown)
        self._passages.close()

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [self._rank(self._index.get_tokens_ids(words), top_k) for words in self._tokenizer.words(queries)]

    def _rank(self, tokens: list[int], top_k: int) -> tuple[Passage, ...]:
        import numpy as np

        if not tokens or top_k < 1:
            return ()
        scores = self._index.get_scores_from_ids(tokens)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > top_k:
            # Everything that ties with the last place stays in: which of them a partition keeps is left to chance.
            hits = hits[scores[hits] >= np.partition(scores[hits], -top_k)[-top_k]]
        best = hits[np.argsort(-scores[hits], kind="stable")][:top_k]
        return tuple(self._passage(int(row), float(scores[row])) for row in best)

    def _passage(self, row: int, score: float) -> Passage:
        line = self._passages[int(self._offsets[row]) : int(self._offsets[row + 1])]
        passage_id, contents = json.loads(line)
        return Passage(passage_id, contents, score)


class _Tokenizer:
    """Cuts corpus and queries into words in the same way."""

    def __init__(self, settings: BM25Settings) -> None:
        import Stemmer

        try:
            stemmer = Stemmer.Stemmer(settings.stemmer) if settings.stemmer else None
            self._options = {
                "stopwords": settings.stopwords,
                "stemmer": stemmer,
                "token_pattern": _TOKEN,
                "show_progress": False,
            }
            self.words([""])
        except (KeyError, ValueError):
            raise ConfigError(
                f"BM25 has no stemmer {settings.stemmer!r} or no stop-words {settings.stopwords!r}; "
                f"stemmers are {', '.join(Stemmer.algorithms())}; none at all works too"
            ) from None

    def words(self, texts: Iterable[str]) -> list[list[str]]:
        import bm25s

        words: list[list[str]] = bm25s.tokenize(map(_fold, texts), return_ids=False, **self._options)
        return words

    def ids(self, texts: Iterable[str]) -> tuple[list[list[int]], dict[str, int]]:
        """Word ids of each text, and the vocabulary. Texts are taken one at a time."""
        import bm25s

        ids, vocabulary = bm25s.tokenize(map(_fold, texts), **self._options)
        return ids, vocabulary


def _fold(text: str) -> str:
    """Without accents: models and users write "Pal Gabor" for "Pál Gábor"."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def _key(corpus: Path | Sequence[Passage], settings: BM25Settings) -> str:
    if isinstance(corpus, Path):
        contents = corpus_checksum(corpus)
    else:
        digest = hashlib.sha256()
        for passage in corpus:
            digest.update(_line(passage))
        contents = digest.hexdigest()
    versions = {name: version(name) for name in ("bm25s", "PyStemmer")}
    parts = json.dumps([_LAYOUT, contents, asdict(settings), _TOKEN, versions], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _line(passage: Passage) -> bytes:
    return valid_unicode(json.dumps([passage.id, passage.contents], ensure_ascii=False)).encode() + b"\n"


def _build(corpus: Path | Sequence[Passage], folder: Path, key: str, settings: BM25Settings) -> None:
    """Write the index into a folder of its own and give it its name when nothing is missing any more."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        _write_index(read_corpus(corpus) if isinstance(corpus, Path) else corpus, new, settings)
        _write_manifest(new, key)
        if _whole(folder, key):  # another process was faster
            return
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if not _whole(folder, key):
                raise


def _write_index(corpus: Iterable[Passage], folder: Path, settings: BM25Settings) -> None:
    import bm25s

    offsets = array.array("q", [0])
    with (folder / _PASSAGES).open("wb") as file:

        def texts() -> Iterator[str]:
            for passage in corpus:
                offsets.append(offsets[-1] + file.write(_line(passage)))
                yield passage.contents

        ids, vocabulary = _Tokenizer(settings).ids(texts())
    if not vocabulary:
        raise DataError("no passage of the corpus holds a word that could be searched for")
    index = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene")
    index.index((ids, vocabulary), show_progress=False)
    index.save(folder, show_progress=False)
    (folder / _OFFSETS).write_bytes(offsets.tobytes())


def _write_manifest(folder: Path, key: str) -> None:
    files = {path.name: _facts(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"key": key, "files": files}, indent=1), encoding="utf-8")


def _whole(folder: Path, key: str) -> bool:
    """Whether every file is there as it was written: by size, small ones by checksum too."""
    try:
        manifest: Any = json.loads((folder / _MANIFEST).read_bytes())
        return bool(
            manifest["key"] == key
            and all(_facts(folder / name) == facts for name, facts in manifest["files"].items())
            and {_PASSAGES, _OFFSETS} <= set(manifest["files"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _facts(path: Path) -> list[int | str]:
    size = path.stat().st_size
    return [size, hashlib.sha256(path.read_bytes()).hexdigest()] if size <= _SMALL else [size]
