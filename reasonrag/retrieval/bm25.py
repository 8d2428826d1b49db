"""BM25 search in this process, over the memory-mapped parts `passages` and `bm25` of an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import DataError
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import LocalRetriever
from reasonrag.retrieval.corpus import CorpusSource, GivenCorpus, open_corpus
from reasonrag.retrieval.index.folder import IndexFolder, Silent
from reasonrag.retrieval.index.passages import PASSAGES, PassageStore, build_passages, passages_plan
from reasonrag.retrieval.index.postings import Tokenizer, bm25_plan, bm25s, build_bm25
from reasonrag.retrieval.index.settings import BM25Config, PassagesConfig
from reasonrag.storage.files import short_hash

_STRICT = PassagesConfig(strict=True)
_MOST_WORDS = 1024  # of a query
_MAX_BYTES = 1 << 30  # while the scores of an index in the cache are merged


class BM25Retriever(LocalRetriever):
    """Okapi BM25 as Lucene computes it, over a corpus of any size. Accents and case do not matter.

    Equal scores keep the order of the corpus, so a query gets the same ranking alone and in a batch. Only the first
    1,024 words of a query count, because a policy that repeats itself endlessly would delay all other queries.
    """

    _at_once = 2_000_000  # about 2 ms

    def __init__(self, index: IndexFolder) -> None:
        """Memory-map the parts `passages` and `bm25`.

        Raises:
            DataError: one is missing, damaged, or was made of other passages.
        """
        passages, bm25 = index.verify("passages"), index.verify("bm25")
        # The manifest also has the token pattern, which is not a setting; an older one may lack newer settings.
        settings = {name: value for name, value in bm25.plan.settings.items() if name in BM25Config.model_fields}
        self._tokenizer = Tokenizer(BM25Config(**settings))
        known = [passages.files[PASSAGES], bm25.plan.document()["settings"], dict(bm25.plan.versions)]
        # One thread, because numpy holds the GIL for most of a search; a second one would only add to the wait.
        super().__init__(PassageStore(index.part("passages")), known=known)
        loaded = bm25s.BM25.load(index.part("bm25"), mmap=True, show_progress=False)
        self._word_ids: dict[str, int] = loaded.vocab_dict
        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        data, rows, starts = (np.asarray(loaded.scores[name]) for name in ("data", "indices", "indptr"))
        self._data: NDArray[np.float32] = data  # what each posting adds to a score, by word
        self._rows: NDArray[np.int32] = rows  # the passage of each posting
        self._starts: NDArray[np.int64] = starts  # [words + 1] where the postings of a word begin

    @classmethod
    def open(cls, corpus: Path | Sequence[Passage], *, cache: Path, config: BM25Config | None = None) -> BM25Retriever:
        """Open the index of a corpus or of given passages; build it in `cache` if it is missing or damaged.

        Several processes may open the same index at once.

        Raises:
            ConfigError: the stemmer or the list of stop-words is unknown.
            DataError: the corpus cannot be read, has unusable rows or no words, or the cache cannot be written.
        """
        config = config or BM25Config()
        Tokenizer(config)  # raises before the corpus is read
        source = open_corpus(str(corpus)) if isinstance(corpus, Path) else GivenCorpus("passages", corpus)
        plan = passages_plan(source, _STRICT)
        decides_the_index = bm25_plan(json.dumps(plan.document(), sort_keys=True), config).document()
        index = IndexFolder(cache / f"bm25-{short_hash(decides_the_index)}")
        passages = index.sound(plan)
        if passages is None or index.sound(bm25_plan(passages.fingerprint, config)) is None:
            try:
                with index.locked():
                    _build(index, source, config)
            except OSError as error:
                raise DataError(f"the BM25 index cannot be written to {cache} ({error.strerror or error})") from error
        return cls(index)

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        rankings = []
        for query in queries:
            words = self._tokenizer.words(query)[:_MOST_WORDS]
            tokens = [self._word_ids[word] for word in words if word in self._word_ids]
            rankings.append(self._rank(tokens, top_k))
        return rankings

    def _rank(self, tokens: list[int], top_k: int) -> tuple[Passage, ...]:
        if not tokens or top_k < 1:
            return ()
        starts, ends = self._starts[tokens].tolist(), self._starts[np.add(tokens, 1)].tolist()
        spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        # bm25s's own sum, without its copies. Its numba backend is no faster, and costs 200 MB of libraries and 8 s of
        # compiling in each process: benchmarks/retrieval.py.
        scores = np.zeros(len(self._passages), dtype=np.float32)
        for span in spans:
            np.add.at(scores, self._rows[span], self._data[span])
        hits = np.flatnonzero(scores >= self._floor(scores, spans, top_k))
        if len(hits) > top_k:
            # Keep everything that ties with the last place, because a partition keeps an arbitrary one of them.
            hits = hits[scores[hits] >= np.partition(scores[hits], -top_k)[-top_k]]
        best = hits[np.argsort(-scores[hits], kind="stable")][:top_k]
        return tuple(map(self._passages.passage, best.tolist(), scores[best].tolist()))

    def _floor(self, scores: NDArray[np.float32], spans: list[slice], top_k: int) -> np.float32:
        """Return a score that all of the best `top_k` passages reach; comparing with 0 instead takes twice as long.

        It is the `top_k`-th best score among the passages with the query's rarest word that at least `top_k` passages
        have.
        """
        sizes = [(span.stop - span.start, span.start) for span in spans]
        size, start = min((size for size in sizes if size[0] >= top_k), default=(0, 0))
        if not size:
            return np.finfo(np.float32).tiny
        found = scores[self._rows[start : start + size]]
        found.partition(size - top_k)
        return np.float32(found[-top_k])


def _build(index: IndexFolder, source: CorpusSource, config: BM25Config) -> None:
    """Build what is missing or damaged; if the corpus is unusable, leave no folder behind."""
    try:
        build_passages(index, source, _STRICT, progress=Silent())
        build_bm25(index, config, max_bytes=_MAX_BYTES, progress=Silent())
    except DataError:
        shutil.rmtree(index.path, ignore_errors=True)
        raise
