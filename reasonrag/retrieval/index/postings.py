"""Build a BM25 index in bounded memory, in the files that bm25s loads.

Passages are tokenized in chunks. Each chunk writes its sorted words and, for each word, the passages that contain it.
Then the chunks are merged: first the vocabulary, then the scores, one range of the vocabulary at a time. The result is
what `bm25s.BM25.index` computes from the whole corpus in memory.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import Stemmer
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore, save_array
from reasonrag.retrieval.index.settings import BM25Config


def _without_jax() -> Any:
    """Import bm25s, which imports JAX where that is installed, and computes with it at once.

    On a GPU, JAX takes three quarters of the memory for that, which the models of this process need.
    """
    loaded = sys.modules.setdefault("jax", None)  # type: ignore[arg-type]  # None makes an import fail
    try:
        import bm25s

        return bm25s
    finally:
        if loaded is None:
            del sys.modules["jax"]


bm25s = _without_jax()
# The names under which bm25s looks for its files.
_DATA, _INDICES, _INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_VOCABULARY, _PARAMETERS = "vocab.index.json", "params.index.json"
# Words of one letter count, or "U.S." and "Malcolm X" would search for less, or for nothing.
_TOKEN = re.compile(r"(?u)\w+")
CHUNK = 65_536  # passages
_BYTES_A_POSTING = 80  # while scores are merged


class Tokenizer:
    """Tokenizes passages and queries alike: drops case, accents and stop-words, and stems words."""

    def __init__(self, settings: BM25Config) -> None:
        """Look up stemmer and stop-words; raise ConfigError if one is unknown."""
        try:
            self._stemmer = Stemmer.Stemmer(settings.stemmer) if settings.stemmer else None
            self._stopwords = frozenset(bm25s.tokenization.Tokenizer(stopwords=settings.stopwords).stopwords)
        except (KeyError, ValueError):
            raise ConfigError(
                f"BM25 has no stemmer {settings.stemmer!r} or no stop-words {settings.stopwords!r}; "
                f"stemmers are {', '.join(Stemmer.algorithms())}, or none"
            ) from None

    def words(self, text: str) -> list[str]:
        """Return the words of a query: what `ids` finds in it, for a fifth of the time."""
        words = [word for word in _TOKEN.findall(_fold(text).lower()) if word not in self._stopwords]
        return words if self._stemmer is None else self._stemmer.stemWords(words)

    def ids(self, texts: Iterable[str]) -> tuple[list[list[int]], dict[str, int]]:
        """Return the word ids of each text, and the vocabulary. Texts are consumed one at a time."""
        ids, vocabulary = bm25s.tokenize(
            map(_fold, texts),
            stopwords=list(self._stopwords),
            stemmer=self._stemmer,
            token_pattern=_TOKEN.pattern,
            show_progress=False,
        )
        return ids, vocabulary


def _titled(contents: str, weight: int) -> str:
    """Repeat the title of a passage, so that it occurs `weight` times.

    >>> _titled("Jaws\\nA shark.", 3)
    'Jaws\\nJaws\\nJaws\\nA shark.'
    """
    title, newline, _ = contents.partition("\n")
    return (title + newline) * (weight - 1) + contents if newline else contents


def bm25_plan(passages: str, settings: BM25Config) -> Plan:
    """Return the plan of the part: fingerprint of the passages, settings, and versions of the tokenizing libraries."""
    versions = {name: version(name) for name in ("bm25s", "PyStemmer")}
    return Plan("bm25", {"passages": passages}, {**settings.model_dump(), "token": _TOKEN.pattern}, versions)


def build_bm25(
    index: IndexFolder,
    settings: BM25Config,
    *,
    max_bytes: int,
    progress: BuildProgress,
    chunk: int = CHUNK,
) -> Manifest:
    """Build the part `bm25` if it is missing or damaged. A killed build resumes.

    The index has the part `passages`; the caller holds its lock. `max_bytes` is the memory for scores while they are
    merged; `bm25_memory` has the rest. `chunk` passages are tokenized at a time, fewer if they are long; any number
    gives the same result.

    Raises:
        ConfigError: the stemmer or the list of stop-words is unknown.
        DataError: no passage contains a word.
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
    # Without a named backend, bm25s would use numba if it is installed.
    parameters = {"k1": settings.k1, "b": settings.b, "method": "lucene", "backend": "numpy"}
    parameters |= {"num_docs": chunks[-1].stop, "version": version("bm25s")}
    with draft.writing(_PARAMETERS) as file:
        file.write(json.dumps(parameters, indent=1).encode())
    return draft.finish({"passages": chunks[-1].stop, "words": len(frequencies), "postings": int(frequencies.sum())})


def bm25_memory(passages: int, words: int, *, max_bytes: int, chunk: int = CHUNK) -> dict[str, int]:
    """Return the bytes that building takes at most, by cause. They are not all needed at once, so the peak is lower.

    The vocabulary is an estimate for natural text (Heaps' law, 40 * words ** 0.55, for the words of all passages);
    nothing else depends on the text. `max_bytes` and `chunk` are those of `build_bm25`.
    """
    return {
        "libraries": 200 << 20,
        "chunk": 120 * min(words, words * chunk // max(passages, 1)),
        "vocabulary": 320 * int(40 * words**0.55),
        "lengths": 20 * passages,
        "merge": max(max_bytes, 8 * passages),
    }


class _Chunk:
    """Words and postings of the passages from `start` to `stop`, as files."""

    def __init__(self, draft: Draft, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self._draft = draft
        self._name = f"{start}-{stop}"

    @property
    def done(self) -> bool:
        """Whether the chunk is complete: the lengths are written last."""
        return self._draft.holds(f"{self._name}/lengths.npy", scratch=True)

    def write(self, ids: list[list[int]], vocabulary: dict[str, int]) -> None:
        """Write the postings of what the tokenizer found."""
        words = sorted(vocabulary)
        ranks = np.empty(len(words), dtype=np.int64)  # by the tokenizer's id: the word's place in the sorted words
        ranks[[vocabulary[word] for word in words]] = np.arange(len(words))
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        # Word and passage in one number, so that sorting orders by word, then by passage.
        pairs = ranks[flat] * len(ids) + np.repeat(np.arange(len(ids)), lengths)
        pairs, times = np.unique(pairs, return_counts=True)
        passages_per_word = np.bincount(pairs // len(ids), minlength=len(words))
        with self._draft.writing(f"{self._name}/words.txt", scratch=True) as file:
            file.write("\n".join(words).encode())
        self.put("indptr", np.concatenate([[0], np.cumsum(passages_per_word)]))
        rows = pairs % len(ids)
        for name, values in (("rows", rows), ("times", times)):
            self.put(name, values.astype(np.min_scalar_type(values.max(initial=0))))
        self.put("lengths", lengths)

    def words(self) -> list[str]:
        text = (self._draft.scratch / self._name / "words.txt").read_text(encoding="utf-8")
        return text.split("\n") if text else []

    def put(self, name: str, values: NDArray[Any]) -> None:
        with self._draft.writing(f"{self._name}/{name}.npy", scratch=True) as file:
            save_array(file, values)

    def array(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = np.load(self._draft.scratch / self._name / f"{name}.npy", mmap_mode="r")
        return values


def _write_vocabulary(draft: Draft, chunks: Sequence[_Chunk]) -> NDArray[np.int64]:
    """Write the sorted words of all chunks, and each chunk's places among them; return the passages per word."""
    words = sorted(set(chain.from_iterable(chunk.words() for chunk in chunks)))
    if not words:
        raise DataError("no passage of the corpus holds a word that can be searched for")
    places = {word: place for place, word in enumerate(words)}
    frequencies = np.zeros(len(words), dtype=np.int64)
    for chunk in chunks:
        chunk_places = np.fromiter(map(places.__getitem__, chunk.words()), dtype=np.int64)
        chunk.put("places", chunk_places)
        frequencies[chunk_places] += np.diff(chunk.array("indptr"))
    with draft.writing(_VOCABULARY) as file:
        file.write(json.dumps(places, ensure_ascii=False).encode())
    return frequencies


class _Merge:
    """Merges the scores of all chunks: in the order of the vocabulary, and of the passages within a word."""

    def __init__(
        self, draft: Draft, chunks: Sequence[_Chunk], frequencies: NDArray[np.int64], settings: BM25Config
    ) -> None:
        self._draft = draft
        self._chunks = chunks
        self._indptr = np.concatenate([[0], np.cumsum(frequencies)])
        lengths = np.concatenate([chunk.array("lengths") for chunk in chunks])
        # Lucene's BM25 (Kamphuis et al., ECIR 2020, table 1), in the types of bm25s, so that every bit is the same.
        passages = len(lengths)
        self._idf = np.log(1 + (passages - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        self._norms = settings.k1 * ((1 - settings.b) + settings.b * lengths / lengths.mean())

    def write(self, limit: int, progress: BuildProgress) -> None:
        """Write the three arrays in ranges of at most `limit` scores; a word with more scores is a range alone."""
        total = int(self._indptr[-1])
        with self._draft.writing(_INDPTR) as file:
            save_array(file, self._indptr)
        progress.start("scores", total=total, unit="scores")
        with self._draft.writing(_DATA) as data, self._draft.writing(_INDICES) as indices:
            for file, kind in ((data, "<f4"), (indices, "<i4")):
                header = {"descr": kind, "fortran_order": False, "shape": (total,)}
                np.lib.format.write_array_header_1_0(file, header)
            start = 0
            while start < len(self._idf):
                within_limit = int(np.searchsorted(self._indptr, self._indptr[start] + limit, side="right")) - 1
                stop = max(start + 1, within_limit)
                scores, rows = self._range(start, stop)
                data.write(scores.data)
                indices.write(rows.data)
                progress.advance(len(rows))
                start = stop

    def _range(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Return scores and passage rows of the words from `start` to `stop`."""
        size = int(self._indptr[stop] - self._indptr[start])
        scores, score_rows = np.empty(size, dtype="<f4"), np.empty(size, dtype="<i4")
        # Where the next chunk's postings of each word go.
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
            score_rows[target] = rows
            heads[words - start] += counts
        return scores, score_rows


def _fold(text: str) -> str:
    """Remove accents: models and users write "Pal Gabor" for "Pál Gábor"."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
