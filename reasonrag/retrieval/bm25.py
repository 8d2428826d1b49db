"""BM25 over the parts `passages` and `bm25` of an index: build and search, in the files of bm25s.

bm25s builds in memory: 2.7 GB a million passages, about 60 GB for Wikipedia. So the build here cuts
passages into words in chunks on disk, and merges the scores in one range of the vocabulary at a time; the
result is what `BM25.index` computes. bm25s loads it, memory-mapped.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import Stemmer
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import LocalRetriever
from reasonrag.retrieval.index import (
    BM25Config,
    BuildProgress,
    Draft,
    IndexFolder,
    Manifest,
    PassagesConfig,
    Plan,
    Silent,
)
from reasonrag.retrieval.passages import (
    PASSAGES,
    UNSPACED,
    GivenCorpus,
    PassageStore,
    build_passages,
    open_corpus,
    passages_plan,
)
from reasonrag.storage.files import short_hash


def _bm25s_without_jax() -> Any:
    """Import bm25s, which computes with JAX at its import where that is installed.

    On a GPU, JAX takes three quarters of the memory, which the models of this process and of others need.
    """
    loaded = sys.modules.setdefault("jax", None)  # type: ignore[arg-type]  # None makes an import of it fail
    try:
        return importlib.import_module("bm25s")
    finally:
        if loaded is None:
            del sys.modules["jax"]


bm25s = _bm25s_without_jax()

# The names under which bm25s looks for its files.
_DATA, _INDICES, _INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
_VOCABULARY, _PARAMETERS = "vocab.index.json", "params.index.json"
# Words of one letter count, or "U.S." and "Malcolm X" would search for less, or for nothing.
_SPACED = re.compile(r"(?u)\w+")
_TOKEN = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
_STEMS = 1 << 16  # words with a stem that is remembered
_CHUNK = 16_384  # passages: 200 MB while they are cut into words
_BYTES_A_POSTING = 80  # while scores are merged
_MAX_BYTES = 1 << 30  # while scores are merged: more does not make it faster
_MOST_WORDS = 1024  # of a query
_STRICT = PassagesConfig(strict=True)

_Array = NDArray[Any]


class Tokenizer:
    """Tokenizes passages and queries alike: drops case, accents and stop-words, and stems words."""

    def __init__(self, settings: BM25Config, *, spaced: bool = False) -> None:
        """Look up stemmer and stop-words; raise ConfigError if one is unknown.

        If `spaced`, words end at spaces and punctuation alone, as in indexes that were built before.
        """
        self._spaced = spaced
        try:
            self._stem = lru_cache(_STEMS)(Stemmer.Stemmer(settings.stemmer).stemWord) if settings.stemmer else str
            self._stopwords = frozenset(bm25s.tokenization.Tokenizer(stopwords=settings.stopwords).stopwords)
        except (KeyError, ValueError):
            raise ConfigError(
                f"BM25 has no stemmer {settings.stemmer!r} or no stop-words {settings.stopwords!r}; "
                f"stemmers are {', '.join(Stemmer.algorithms())}, or none"
            ) from None

    def words(self, text: str) -> list[str]:
        """Return the words of a text that count, in order."""
        folded = _fold(text).lower()
        token = _SPACED if self._spaced or folded.isascii() else _TOKEN  # the same for ASCII, and quicker
        return [self._stem(word) for word in token.findall(folded) if word not in self._stopwords]


class BM25Retriever(LocalRetriever):
    """Okapi BM25 as Lucene computes it, over a corpus of any size. Accents and case do not matter.

    Equal scores keep the order of the corpus, so a query gets the same ranking
    alone and in a batch. Only the first 1,024 words of a query count, because
    a policy that repeats itself endlessly would delay all other queries.
    """

    _at_once = 2_000_000  # about 2 ms
    _range = 1 << 20  # passages that are scored together: their scores stay in the processor's caches

    def __init__(self, index: IndexFolder) -> None:
        """Memory-map the parts `passages` and `bm25`.

        Raises:
            DataError: one is missing, damaged, or was made of other passages.
        """
        passages, bm25 = index.verify("passages"), index.verify("bm25")
        # The manifest also has the token pattern, which is
        # not a setting; an older one may lack newer settings.
        settings = {name: value for name, value in bm25.plan.settings.items() if name in BM25Config.model_fields}
        spaced = bm25.plan.settings.get("token") == _SPACED.pattern
        self._tokenizer = Tokenizer(BM25Config(**settings), spaced=spaced)
        identity = [passages.files[PASSAGES], bm25.plan.document()["settings"], dict(bm25.plan.versions)]
        # One thread, because numpy holds the GIL for most of
        # a search; a second one would only add to the wait.
        super().__init__(PassageStore(index), identity=identity)
        loaded = bm25s.BM25.load(index.part("bm25"), mmap=True, show_progress=False)
        self._word_ids: dict[str, int] = loaded.vocab_dict
        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        # What each posting adds to a score, by word; the passage of each; [words + 1] where those of a word begin.
        self._data: NDArray[np.float32] = np.asarray(loaded.scores["data"])
        self._rows: NDArray[np.int32] = np.asarray(loaded.scores["indices"])
        self._starts: NDArray[np.int64] = np.asarray(loaded.scores["indptr"])
        # Of the ranges; in the type of the rows, or each search would copy those.
        self._edges = np.append(np.arange(0, len(self._passages), self._range), len(self._passages)).astype(np.int32)

    @classmethod
    def open(cls, corpus: Path | Sequence[Passage], *, cache: Path, config: BM25Config | None = None) -> BM25Retriever:
        """Open the index of a corpus or of given passages; build it in `cache` if it is missing or damaged.

        Several processes may open the same index at once.

        Raises:
            ConfigError: the stemmer or the list of stop-words is unknown.
            DataError: the corpus cannot be read, or has unusable rows or no words.
        """
        config = config or BM25Config()
        source = open_corpus(str(corpus)) if isinstance(corpus, Path) else GivenCorpus("passages", corpus)
        plan = passages_plan(source, _STRICT)
        decides_the_index = _plan(json.dumps(plan.document(), sort_keys=True), config).document()
        index = IndexFolder(cache / f"bm25-{short_hash(decides_the_index)}", setting="retrieval.cache")
        passages = index.sound(plan)
        if passages is None or index.sound(_plan(passages.fingerprint, config)) is None:
            with index.locked():
                build_passages(index, source, _STRICT, progress=Silent())
                build_bm25(index, config, progress=Silent())
        return cls(index)

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [self._rank(query, top_k) for query in queries]

    def _rank(self, query: str, top_k: int) -> tuple[Passage, ...]:
        words = self._tokenizer.words(query)[:_MOST_WORDS]
        tokens = [self._word_ids[word] for word in words if word in self._word_ids]
        if not tokens or top_k < 1:
            return ()
        starts, ends = self._starts[tokens].tolist(), self._starts[np.add(tokens, 1)].tolist()
        cuts: list[Sequence[int]] = list(zip(starts, ends, strict=True))
        if len(self._edges) > 2:
            cuts = [(start + np.searchsorted(self._rows[start:end], self._edges)).tolist() for start, end in cuts]
        best, best_scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        of_range = np.empty(min(self._range, len(self._passages)), dtype=np.float32)
        for number, first in enumerate(self._edges[:-1]):
            # The sum of bm25s, without its copies. Its numba backend
            # is not faster, and costs 200 MB of libraries and 8 s of
            # compiling in each process: benchmarks/retrieval.py.
            scores = of_range[: self._edges[number + 1] - first]
            scores.fill(0)
            spans = [slice(cut[number], cut[number + 1]) for cut in cuts]
            for span in spans:
                rows = self._rows[span]
                np.add.at(scores, rows - first if first else rows, self._data[span])
            floor = best_scores[-1] if len(best) == top_k else self._floor(scores, spans, first, top_k)
            hits = np.flatnonzero(scores >= floor)
            if len(hits) > top_k:
                # Keep everything that ties with the last place,
                # because a partition keeps an arbitrary one of them.
                hits = hits[scores[hits] >= np.partition(scores[hits], -top_k)[-top_k]]
            best, best_scores = np.append(best, hits + first), np.append(best_scores, scores[hits])
            order = np.argsort(-best_scores, kind="stable")[:top_k]
            best, best_scores = best[order], best_scores[order]
        return tuple(map(self._passages.passage, best.tolist(), best_scores.tolist()))

    def _floor(self, scores: NDArray[np.float32], spans: list[slice], first: int, top_k: int) -> np.float32:
        """Return a score that all of the best `top_k` passages reach; comparing with 0 instead takes twice as long.

        It is the `top_k`-th best score among the passages with the
        rarest word of the query that is in at least `top_k` passages.
        """
        sizes = [(span.stop - span.start, span.start) for span in spans]
        size, start = min((size for size in sizes if size[0] >= top_k), default=(0, 0))
        if not size:
            return np.finfo(np.float32).tiny
        of_rarest_word = scores[self._rows[start : start + size] - first]
        of_rarest_word.partition(size - top_k)
        return np.float32(of_rarest_word[-top_k])


def build_bm25(
    index: IndexFolder,
    settings: BM25Config,
    *,
    progress: BuildProgress,
    max_bytes: int = _MAX_BYTES,
    chunk: int = _CHUNK,
) -> Manifest:
    """Build the part `bm25` if it is missing or damaged. A killed build resumes.

    The index has the part `passages`; the caller holds its lock. `max_bytes` is
    the memory for the scores that are merged together; those of one word are
    never divided. `chunk` passages are cut into words at a time, fewer if they
    are long; it decides the order of the words in the files, and no score.

    Raises:
        ConfigError: the stemmer or the list of stop-words is unknown.
        DataError: no passage contains a word.
    """
    plan = _plan(index.need("passages").fingerprint, settings)
    if manifest := index.sound(plan):
        return manifest
    tokenizer, draft = Tokenizer(settings), Draft(index, plan)
    chunks: list[_Chunk] = []
    vocabulary: dict[str, int] = {}
    with closing(PassageStore(index)) as store:
        progress.start("words of passages", total=len(store), unit="passages")
        for start, stop in store.ranges(chunk):
            piece = _Chunk(draft, start)
            chunks.append(piece)
            if piece.is_done:
                for word in piece.new_words():
                    vocabulary[word] = len(vocabulary)
            else:
                texts = (_titled(text, settings.title_weight) for text in store.contents(start, stop))
                piece.write(map(tokenizer.words, texts), vocabulary)
            progress.advance(stop - start)
    if not vocabulary:
        raise DataError("no passage of the corpus holds a word that can be searched for")
    # Passages by word.
    frequencies: Any = sum(np.bincount(piece.array("words"), minlength=len(vocabulary)) for piece in chunks)
    indptr = np.concatenate([[0], np.cumsum(frequencies)])
    postings = int(indptr[-1])
    at_once = min(max_bytes, _MAX_BYTES) // _BYTES_A_POSTING
    progress.start("scores", total=postings, unit="scores")
    with draft.writing(_DATA) as data, draft.writing(_INDICES) as indices:
        for file, kind in ((data, "<f4"), (indices, "<i4")):
            np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (postings,)})
        for scores, rows in _merged(chunks, frequencies, indptr, settings, at_once):
            data.write(scores.astype("<f4").data)
            indices.write(rows.data)
            progress.advance(len(rows))
    # Without a named backend, bm25s would use numba if it is installed.
    parameters = {"k1": settings.k1, "b": settings.b, "method": "lucene", "backend": "numpy"}
    parameters |= {"num_docs": stop, "version": version("bm25s")}
    draft.save(_INDPTR, indptr)
    for name, document in ((_VOCABULARY, vocabulary), (_PARAMETERS, parameters)):
        with draft.writing(name) as file:
            file.write(json.dumps(document, ensure_ascii=False).encode())
    return draft.finish({"passages": stop, "words": len(vocabulary), "postings": postings})


def _plan(passages: str, settings: BM25Config) -> Plan:
    """Return the plan of the part: fingerprint of the passages, settings, and versions of the tokenizing libraries."""
    versions = {name: version(name) for name in ("bm25s", "PyStemmer")}
    return Plan("bm25", {"passages": passages}, {**settings.model_dump(), "token": _TOKEN.pattern}, versions)


class _Chunk:
    """Words and postings of some passages, as files in the scratch folder of a draft.

    Arrays: `lengths` in words by passage; and by posting, sorted by word,
    then by passage: `words` (ids), `rows` (passages, counted from the first
    of the chunk) and `times` (how often the word occurs in the passage).
    """

    def __init__(self, draft: Draft, start: int) -> None:
        self.start = start
        self._draft = draft
        self._folder = f"{start:012d}"

    @property
    def is_done(self) -> bool:
        """Whether the chunk is complete, and as it was written."""
        names = ("words.txt", "words.npy", "rows.npy", "times.npy", "lengths.npy")
        return all(self._draft.holds(f"{self._folder}/{name}", scratch=True) for name in names)

    def write(self, texts: Iterable[list[str]], vocabulary: dict[str, int]) -> None:
        """Write the chunk, given the words of each passage; words that no earlier chunk has get the next ids."""
        known = len(vocabulary)
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words] for words in texts]
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        # Word and passage in one number, so that sorting orders by word, then by passage.
        pairs = flat * len(ids) + np.repeat(np.arange(len(ids)), lengths)
        pairs, times = np.unique(pairs, return_counts=True)
        words, rows = np.divmod(pairs, len(ids))
        with self._draft.writing(f"{self._folder}/words.txt", scratch=True) as file:
            file.write("\n".join(islice(vocabulary, known, None)).encode())
        for name, values in {"words": words, "rows": rows, "times": times, "lengths": lengths}.items():
            smallest = values.astype(np.min_scalar_type(values.max(initial=0)))
            self._draft.save(f"{self._folder}/{name}.npy", smallest, scratch=True)

    def new_words(self) -> list[str]:
        """Return the words that no earlier chunk has."""
        text = (self._draft.scratch / self._folder / "words.txt").read_text(encoding="utf-8")
        return text.split("\n") if text else []

    def array(self, name: str) -> _Array:
        return np.asarray(np.load(self._draft.scratch / self._folder / f"{name}.npy", mmap_mode="r"))


def _merged(
    chunks: Sequence[_Chunk], frequencies: _Array, indptr: _Array, settings: BM25Config, limit: int
) -> Iterator[tuple[_Array, _Array]]:
    """Yield scores and passages of all postings, by word, then by passage, in ranges of about `limit` postings."""
    lengths = np.concatenate([chunk.array("lengths") for chunk in chunks]).astype(np.int32)
    # Lucene's BM25 (Kamphuis et al., ECIR 2020, table 1), in the types of bm25s, so that every bit is the
    # same: idf * tf / (tf + k1 * (1 - b + b * length / mean length))
    idf = np.log(1 + (len(lengths) - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
    norms = settings.k1 * ((1 - settings.b) + settings.b * lengths / lengths.mean())
    start = 0
    while start < len(idf):
        within_limit = int(np.searchsorted(indptr, indptr[start] + limit, side="right")) - 1
        stop = max(start + 1, within_limit)
        of_chunks = []
        for chunk in chunks:
            low, high = np.searchsorted(chunk.array("words"), (start, stop))
            words, rows, times = (chunk.array(name)[low:high] for name in ("words", "rows", "times"))
            of_chunks.append((words, rows.astype(np.int32) + np.int32(chunk.start), times))
        words, rows, times = map(np.concatenate, zip(*of_chunks, strict=True))
        # Chunks are in the order of their passages, so a stable
        # sort by word leaves each word's passages in order.
        order = np.argsort(words, kind="stable")
        words, rows, times = words[order], rows[order], times[order]
        yield idf[words] * (times / (norms[rows] + times)), rows
        start = stop


def _titled(contents: str, weight: int) -> str:
    """Repeat the title of a passage, so that it occurs `weight` times.

    >>> _titled("Jaws\\nA shark.", 3)
    'Jaws\\nJaws\\nJaws\\nA shark.'
    """
    title, newline, _ = contents.partition("\n")
    return (title + newline) * (weight - 1) + contents if newline else contents


def _fold(text: str) -> str:
    """Remove accents: models and users write "Pal Gabor" for "Pál Gábor"."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
