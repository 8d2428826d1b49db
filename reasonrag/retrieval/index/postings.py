"""BM25 in the files that bm25s loads, built in bounded memory.

Passages are cut into words in chunks; each chunk leaves its words in order, and for each word the passages that have
it. Then the chunks are merged: the vocabulary first, the scores range by range of it. What comes out is what
`bm25s.BM25.index` computes from the whole corpus in memory.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.retrieval.index.settings import BM25Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The names under which bm25s looks for its files.
_DATA, _INDICES, _INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_VOCABULARY, _PARAMETERS = "vocab.index.json", "params.index.json"
# Words of one letter count: without them "U.S." or "Malcolm X" would search for less than they say, or for nothing.
_TOKEN = r"(?u)\w+"
CHUNK = 65_536  # passages
_BYTES_A_POSTING = 80  # while scores are merged


class Tokenizer:
    """Cuts passages and queries into words in the same way: without case, accents, stop-words and endings."""

    def __init__(self, settings: BM25Config) -> None:
        """Find stemmer and stop-words.

        Raises:
            ConfigError: there are none of that name.
        """
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
        """The words of each text."""
        import bm25s

        words: list[list[str]] = bm25s.tokenize(map(_fold, texts), return_ids=False, **self._options)
        return words

    def ids(self, texts: Iterable[str]) -> tuple[list[list[int]], dict[str, int]]:
        """Word ids of each text, and the vocabulary. Texts are taken one at a time."""
        import bm25s

        ids, vocabulary = bm25s.tokenize(map(_fold, texts), **self._options)
        return ids, vocabulary


def _titled(contents: str, weight: int) -> str:
    """A passage with its title so many times.

    >>> _titled("Jaws\\nA shark.", 3)
    'Jaws\\nJaws\\nJaws\\nA shark.'
    """
    title, newline, _ = contents.partition("\n")
    return (title + newline) * (weight - 1) + contents if newline else contents


def bm25_plan(passages: str, settings: BM25Config) -> Plan:
    """What decides the BM25 part: the fingerprint of the passages, the settings, and the libraries that cut words."""
    versions = {name: version(name) for name in ("bm25s", "PyStemmer")}
    return Plan("bm25", {"passages": passages}, {**settings.model_dump(), "token": _TOKEN}, versions)


def build_bm25(
    index: IndexFolder,
    settings: BM25Config,
    *,
    max_bytes: int,
    progress: BuildProgress,
    chunk: int = CHUNK,
) -> Manifest:
    """Build the part `bm25`, if it is not there or damaged, going on where a killed process stopped.

    Call it under `index.locked()`.

    Args:
        index: with the part `passages`.
        settings: of the search.
        max_bytes: what scores may take while they are merged; see `bm25_memory` for the rest.
        progress: is told.
        chunk: passages cut into words at a time, fewer where they are long. It does not change the result.

    Raises:
        ConfigError: no such stemmer or stop-words.
        DataError: no passage holds a word.
    """
    plan = bm25_plan(index.need("passages").fingerprint, settings)
    if made := index.sound(plan):
        return made
    tokenizer = Tokenizer(settings)
    draft = Draft(index, plan)
    store = PassageStore(index.part("passages"))
    chunks = [_Chunk(draft, start, stop) for start, stop in store.ranges(chunk)]
    done = sum(piece.stop - piece.start for piece in chunks if piece.done)
    progress.start("words of passages", total=len(store), unit="passages", done=done)
    for piece in chunks:
        if not piece.done:
            texts = store.contents(piece.start, piece.stop)
            piece.write(*tokenizer.ids(_titled(text, settings.title_weight) for text in texts))
            progress.advance(piece.stop - piece.start)
    store.close()
    frequencies = _write_vocabulary(draft, chunks)
    _Merge(draft, chunks, frequencies, settings).write(max_bytes // _BYTES_A_POSTING, progress)
    _write_parameters(draft, settings, chunks[-1].stop)
    return draft.finish({"passages": chunks[-1].stop, "words": len(frequencies), "postings": int(frequencies.sum())})


def bm25_memory(passages: int, words: int, *, max_bytes: int, chunk: int = CHUNK) -> dict[str, int]:
    """Bytes that building takes at most, by cause: their sum is more than the peak, as not all come at once.

    The vocabulary is an estimate for natural text (Heaps' law, 40 * words ** 0.55); nothing else depends on the text.

    Args:
        passages: in the index.
        words: of all of them together.
        max_bytes: as for `build_bm25`.
        chunk: as for `build_bm25`.
    """
    return {
        "libraries": 200 << 20,
        "chunk": 120 * min(words, words * chunk // max(passages, 1)),
        "vocabulary": 320 * int(40 * words**0.55),
        "lengths": 20 * passages,
        "merge": max(max_bytes, 8 * passages),
    }


class _Chunk:
    """Words and postings of passages `start` to `stop`, as files."""

    def __init__(self, draft: Draft, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self._draft = draft
        self._name = f"{start}-{stop}"

    @property
    def done(self) -> bool:
        """Whether it was written, now or before a kill: the lengths are the last file."""
        return self._draft.holds(f"{self._name}/lengths.npy", scratch=True)

    def write(self, ids: list[list[int]], vocabulary: dict[str, int]) -> None:
        """Keep what the tokenizer found."""
        import numpy as np

        words = sorted(vocabulary)
        place = np.empty(len(words), dtype=np.int64)
        place[[vocabulary[word] for word in words]] = np.arange(len(words))
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        pairs = place[flat] * len(ids) + np.repeat(np.arange(len(ids)), lengths)
        pairs, times = np.unique(pairs, return_counts=True)
        found = np.bincount(pairs // len(ids), minlength=len(words))
        with self._draft.writing(f"{self._name}/words.txt", scratch=True) as file:
            file.write("\n".join(words).encode())
        self.put("indptr", np.concatenate([[0], np.cumsum(found)]))
        rows = pairs % len(ids)
        for name, values in (("rows", rows), ("times", times)):
            self.put(name, values.astype(np.min_scalar_type(values.max(initial=0))))
        self.put("lengths", lengths)

    def words(self) -> list[str]:
        """In order."""
        text = (self._draft.scratch / self._name / "words.txt").read_text(encoding="utf-8")
        return text.split("\n") if text else []

    def put(self, name: str, values: NDArray[Any]) -> None:
        """Write an array."""
        with self._draft.writing(f"{self._name}/{name}.npy", scratch=True) as file:
            _save(file, values)

    def array(self, name: str) -> NDArray[Any]:
        """An array, memory-mapped."""
        import numpy as np

        found: NDArray[Any] = np.load(self._draft.scratch / self._name / f"{name}.npy", mmap_mode="r")
        return found


def _write_vocabulary(draft: Draft, chunks: Sequence[_Chunk]) -> NDArray[np.int64]:
    """Write the words of all chunks, in order; returns how many passages have each. Each chunk learns their places."""
    import numpy as np

    words = sorted(set(chain.from_iterable(chunk.words() for chunk in chunks)))
    if not words:
        raise DataError("no passage of the corpus holds a word that could be searched for")
    places = {word: place for place, word in enumerate(words)}
    frequencies = np.zeros(len(words), dtype=np.int64)
    for chunk in chunks:
        mine = np.fromiter(map(places.__getitem__, chunk.words()), dtype=np.int64)
        chunk.put("places", mine)
        frequencies[mine] += np.diff(chunk.array("indptr"))
    with draft.writing(_VOCABULARY) as file:
        file.write(json.dumps(places, ensure_ascii=False).encode())
    return frequencies


class _Merge:
    """The scores of all chunks in the order of the vocabulary, and within a word in that of the passages."""

    def __init__(
        self, draft: Draft, chunks: Sequence[_Chunk], frequencies: NDArray[np.int64], settings: BM25Config
    ) -> None:
        import numpy as np

        self._draft = draft
        self._chunks = chunks
        self._indptr = np.concatenate([[0], np.cumsum(frequencies)])
        lengths = np.concatenate([chunk.array("lengths") for chunk in chunks])
        # Lucene's BM25 (Kamphuis et al., ECIR 2020, table 1), with bm25s's types, so that no score differs in a bit.
        passages = len(lengths)
        self._idf = np.log(1 + (passages - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        self._norms = settings.k1 * ((1 - settings.b) + settings.b * lengths / lengths.mean())

    def write(self, limit: int, progress: BuildProgress) -> None:
        """Write the three arrays, in ranges of at most `limit` scores, or of one word that has more."""
        import numpy as np

        total = int(self._indptr[-1])
        with self._draft.writing(_INDPTR) as file:
            _save(file, self._indptr)
        progress.start("scores", total=total, unit="scores")
        with self._draft.writing(_DATA) as data, self._draft.writing(_INDICES) as indices:
            for file, kind in ((data, "<f4"), (indices, "<i4")):
                header = {"descr": kind, "fortran_order": False, "shape": (total,)}
                np.lib.format.write_array_header_1_0(file, header)
            start = 0
            while start < len(self._idf):
                behind = int(np.searchsorted(self._indptr, self._indptr[start] + limit, side="right")) - 1
                stop = max(start + 1, behind)
                scores, rows = self._range(start, stop)
                data.write(scores.data)
                indices.write(rows.data)
                progress.advance(len(rows))
                start = stop

    def _range(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Scores and passages of words `start` to `stop`."""
        import numpy as np

        size = int(self._indptr[stop] - self._indptr[start])
        scores, found_in = np.empty(size, dtype="<f4"), np.empty(size, dtype="<i4")
        heads = self._indptr[start:stop] - self._indptr[start]
        for chunk in self._chunks:
            places = chunk.array("places")
            low, high = np.searchsorted(places, (start, stop))
            words, bounds = np.array(places[low:high]), np.array(chunk.array("indptr")[low : high + 1])
            counts = np.diff(bounds)
            part = slice(bounds[0], bounds[-1])
            rows = chunk.array("rows")[part].astype(np.int64) + chunk.start
            times = np.array(chunk.array("times")[part])
            target = np.repeat(heads[words - start] - bounds[:-1], counts) + np.arange(bounds[0], bounds[-1])
            scores[target] = np.repeat(self._idf[words], counts) * (times / (self._norms[rows] + times))
            found_in[target] = rows
            heads[words - start] += counts
        return scores, found_in


def _save(file: IO[bytes], values: NDArray[Any]) -> None:
    """The bytes of `np.save`, whose error on a full disk says neither which file nor why."""
    import numpy as np

    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
    file.write(values.data)


def _write_parameters(draft: Draft, settings: BM25Config, passages: int) -> None:
    """What bm25s has to know. It takes numba where it finds it, unless told which backend to take."""
    known = {"k1": settings.k1, "b": settings.b, "method": "lucene", "backend": "numpy"}
    with draft.writing(_PARAMETERS) as file:
        file.write(json.dumps({**known, "num_docs": passages, "version": version("bm25s")}, indent=1).encode())


def _fold(text: str) -> str:
    """Without accents: models and users write "Pal Gabor" for "Pál Gábor"."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
