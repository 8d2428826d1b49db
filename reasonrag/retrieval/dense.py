"""Dense retrieval in this process: an encoder for the queries, and the vectors of an index folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.settings import validate
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import LocalRetriever
from reasonrag.retrieval.encoders import TextEncoder, differences, find_files, open_text_encoder
from reasonrag.retrieval.index.embeddings import Embeddings, encoder_of
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.index.passages import PASSAGES, PassageStore
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.retrieval.index.vectors import TOP_K, ExactSearch, open_vectors, recall_at_10

_BATCH = 64  # queries that the model reads at once


class DenseRetriever(LocalRetriever):
    """Finds the passages with the vectors closest to the query's, by cosine; equal ones in the order of the corpus.

    The other queries of a batch can change the last digit of a query's vector, and so its ranking if two passages are
    that close to each other. In half precision this happens more often.
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
        """Open the vectors (on all GPUs if `gpu` is set) and, on `device`, the encoder.

        `encoder` is an open encoder, or its location; None takes its location when the index was built, or the Hub.

        Raises:
            DataError: a part is missing or damaged.
            ConfigError: the encoder cannot be opened, or the index was built with another one.
        """
        self._index = index
        passages = index.verify("passages")
        identity, location = encoder_of(index)
        self._vectors = open_vectors(index, gpu=gpu)
        if encoder is None or isinstance(encoder, str):
            encoder = _open(index, identity, encoder or location, device, trust_remote_code)
        if differences(identity, encoder.identity):
            raise _other_encoder(index, identity, encoder.identity)
        if encoder.dims != self._vectors.dims:
            raise ConfigError(
                f"index {index.path} has vectors of {self._vectors.dims} dimensions and {_named(identity)} makes "
                f"{encoder.dims}; build its vectors again"
            )
        self._encoder = encoder
        searched = index.manifest("vectors") or index.need("embeddings")
        # By content, so that the same passages have the same fingerprint under any file name.
        decisive = [passages.files[PASSAGES], dict(searched.files), dict(searched.counts), dict(identity)]
        # One thread, because FAISS on GPUs allows no second one, and the encoder uses all cores.
        super().__init__(PassageStore(index.part("passages")), identity=decisive)

    def recall_at_10(self, queries: Sequence[str]) -> float:
        """Return the share of exact search's ten best that this search finds, in [0, 1]. Needs the embeddings."""
        vectors = self._encoder.encode_queries(queries)
        exact = ExactSearch(Embeddings(self._index))
        return recall_at_10(self._vectors.search(vectors, TOP_K), exact.search(vectors, TOP_K))

    def _search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        queries = [valid_unicode(query) for query in queries]
        unique_queries = list(dict.fromkeys(query for query in queries if query.strip()))
        if not unique_queries or top_k < 1:
            return [() for _ in queries]
        try:
            vectors = self._encoder.encode_queries(unique_queries)
            scores, rows = self._vectors.search(vectors, min(top_k, self._vectors.rows))
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError("dense search failed", quoting=error, cause="search") from error
        rankings: dict[str, tuple[Passage, ...]] = {}
        for query, query_scores, query_rows in zip(unique_queries, scores, rows, strict=True):
            best = [(int(row), float(score)) for row, score in zip(query_rows, query_scores, strict=True) if row >= 0]
            rankings[query] = tuple(self._passages.passage(row, score) for row, score in best)
        return [rankings.get(query, ()) for query in queries]


def _open(
    index: IndexFolder, identity: Mapping[str, str], location: str, device: str | None, trust_remote_code: bool
) -> TextEncoder:
    """Open the encoder with this identity from its location."""
    if not location and not identity["revision"]:
        raise ConfigError(
            f"index {index.path} was built with {_named(identity)} from a folder that is not known on this "
            "machine; give its path (--encoder)"
        )
    name = location or identity["name"]
    revision = identity["revision"] if name == identity["name"] else None
    files = find_files(name, revision=revision or None)
    # Checked before loading, because another model may not have the length or the pooling that is asked for.
    checksum = files.checksum()
    if checksum != identity["checksum"]:
        raise _other_encoder(index, identity, {**identity, "name": files.name, "checksum": checksum})
    settings = {
        **{key: identity[key] for key in ("dtype", "query_prefix", "passage_prefix")},
        "name": name,
        "device": device,
        "batch_size": _BATCH,
        "max_tokens": int(identity["max_tokens"]),
        "trust_remote_code": trust_remote_code,
    }
    return open_text_encoder(validate(EncoderConfig, settings), revision=revision or None)


def _other_encoder(index: IndexFolder, built: Mapping[str, str], opened: Mapping[str, str]) -> ConfigError:
    return ConfigError(
        f"index {index.path} was built with {_named(built)}, this is {_named(opened)}: {differences(built, opened)}; "
        "open it with the encoder that built it, or build it again"
    )


def _named(identity: Mapping[str, str]) -> str:
    return f"encoder {identity['name']} ({identity['checksum'][:12]})"
