"""Dense retrieval in this process: an encoder for queries, and the vectors of an index folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.settings import validate
from reasonrag.core.text import one_line, valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.encoder_models import POOLINGS, find_files
from reasonrag.retrieval.encoders import TextEncoder, differences, open_text_encoder
from reasonrag.retrieval.index.embeddings import Embeddings, encoder_of
from reasonrag.retrieval.index.faiss_search import ExactSearch
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.index.passages import PASSAGES, PassageStore
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.retrieval.index.vector_settings import TOP_K, recall_at_10
from reasonrag.retrieval.index.vectors import open_vectors

_BATCH = 64  # queries that the model reads at once


class DenseRetriever:
    """The passages whose vectors are closest to the query's, by cosine; equal ones in the order of the corpus.

    A query's vector depends on the others that it is encoded with, in the last digit of float32 alone; so does its
    ranking only where two passages are as close to each other as that. In half precision this is seen more often.
    """

    def __init__(
        self,
        index: IndexFolder,
        encoder: TextEncoder | str | None = None,
        *,
        gpu: bool = False,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Open vectors and encoder, as the index says.

        Args:
            index: with passages, and with embeddings or vectors.
            encoder: an open one, or where it lies now; None is where it lay when the index was built, or the Hub.
            gpu: search on all GPUs.
            device: of the encoder.
            trust_remote_code: run Python code that comes with the model.

        Raises:
            DataError: a part is missing or damaged.
            ConfigError: the encoder cannot be opened, or is not the one that the index was built with.
        """
        self._index = index
        passages = index.verify("passages")
        identity, location = encoder_of(index)
        self._vectors = open_vectors(index, gpu=gpu)
        if encoder is None or isinstance(encoder, str):
            encoder = _open(index, identity, encoder or location, device, trust_remote_code)
        _check(index, identity, encoder, self._vectors.dims)
        self._encoder = encoder
        self._store = PassageStore(index.part("passages"))
        searched = index.manifest("vectors") or index.need("embeddings")
        # By content: the same passages give the same results whatever their file was called.
        known = [passages.files[PASSAGES], dict(searched.files), dict(searched.counts), dict(identity)]
        self._fingerprint = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dense")

    @property
    def fingerprint(self) -> str:
        """16 hex digits over passages, vectors and, through them, the encoder."""
        return self._fingerprint

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """`[len(queries)]` rankings of at most `top_k` passages, best first. An empty query finds nothing.

        Raises:
            RetrievalError: the encoder or the search failed, for lack of memory for example.
        """
        # One thread: FAISS on GPUs allows no second one, and the encoder fills all cores by itself.
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, list(queries), top_k)

    async def recall_at_10(self, queries: Sequence[str]) -> float:
        """Share of exact search's ten best that this search finds, in [0, 1]; the index has its embeddings."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._recall, list(queries))

    async def aclose(self) -> None:
        """Wait for the search in progress, then let go of thread and files."""
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        queries = [valid_unicode(query) for query in queries]
        asked = list(dict.fromkeys(query for query in queries if query.strip()))
        if not asked or top_k < 1:
            return [() for _ in queries]
        try:
            scores, rows = self._vectors.search(self._encoder.encode_queries(asked), min(top_k, self._vectors.rows))
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError(f"dense search failed ({one_line(str(error))[-200:]})", cause="search") from error
        found = {
            query: tuple(
                self._store.passage(int(row), float(score)) for score, row in zip(*best, strict=True) if row >= 0
            )
            for query, *best in zip(asked, scores, rows, strict=True)
        }
        return [found.get(query, ()) for query in queries]

    def _recall(self, queries: list[str]) -> float:
        vectors = self._encoder.encode_queries(queries)
        exact = ExactSearch(Embeddings.open(self._index))
        return recall_at_10(self._vectors.search(vectors, TOP_K), exact.search(vectors, TOP_K))


def _open(
    index: IndexFolder, identity: Mapping[str, str], location: str, device: str | None, trust_remote_code: bool
) -> TextEncoder:
    """The encoder of that identity, from where it is said to lie."""
    if not location and not identity["revision"]:
        raise ConfigError(
            f"index {index.path} was built with {_named(identity)} from a folder that is not known here; say where it "
            "lies (--encoder)"
        )
    name = location or identity["name"]
    revision = identity["revision"] if name == identity["name"] else None
    files = find_files(name, revision=revision or None)
    # Before it is loaded: another model may not even have the length or the pooling that this one is opened with.
    if (found := files.checksum()) != identity["checksum"]:
        raise _other(index, identity, {**identity, "name": files.name, "checksum": found})
    settings = {
        **{name: identity[name] for name in ("family", "dtype", "query_prefix", "passage_prefix")},
        "name": name,
        "revision": revision or None,
        "device": device,
        "batch_size": _BATCH,
        "max_tokens": int(identity["max_tokens"]),
        # A model with modules may pool in a way that cannot be asked for; `_check` compares it in any case.
        "pooling": identity["pooling"] if identity["pooling"] in POOLINGS else None,
        "trust_remote_code": trust_remote_code,
    }
    return open_text_encoder(validate(EncoderConfig, settings))


def _check(index: IndexFolder, identity: Mapping[str, str], encoder: TextEncoder, dims: int) -> None:
    if differences(identity, encoder.identity):
        raise _other(index, identity, encoder.identity)
    if encoder.dims != dims:
        raise ConfigError(
            f"index {index.path} has vectors of {dims} dimensions and {_named(identity)} makes {encoder.dims}; build "
            "its vectors again"
        )


def _other(index: IndexFolder, built: Mapping[str, str], found: Mapping[str, str]) -> ConfigError:
    return ConfigError(
        f"index {index.path} was built with {_named(built)}, this is {_named(found)}: {differences(built, found)}; "
        "open it with the encoder that built it, or build it again"
    )


def _named(identity: Mapping[str, str]) -> str:
    return f"encoder {identity['name']} ({identity['checksum'][:12]})"
