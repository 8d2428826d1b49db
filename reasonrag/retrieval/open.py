"""Open an index folder as a retriever: BM25, dense or hybrid, optionally reranked by a cross-encoder."""

from __future__ import annotations

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import named_path
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index.folder import IndexFolder

_RERANK_DEPTH = 20  # passages per query that a reranker reads


def open_index(config: RetrievalConfig, *, trust_remote_code: bool = False) -> Retriever:
    """Open the index in the folder `config.index`, checked and ready.

    The `kind` None is the best that the index has; `encoder`, `reranker`, `device` and `gpu` set how it
    is searched. None of them is needed for an index that was built on this machine.

    Raises:
        DataError: the index is missing, or one of its files is missing or damaged.
        ConfigError: the index has no such kind, or a library that it needs is not installed.
    """
    index = IndexFolder(named_path(str(config.index)))
    index.need("passages")
    available = kinds(index)
    if not available:
        raise ConfigError(f"{index.path} has passages and no search index; run index build with a --kind")
    if config.kind is not None and config.kind not in available:
        raise ConfigError(f"{index.path} cannot be searched by {config.kind!r}; it has {', '.join(available)}")
    retriever = _open(config.kind or available[0], index, config, trust_remote_code)
    if config.reranker is None:
        return retriever
    from reasonrag.retrieval.combined import CrossEncoderReranker, RerankedRetriever

    reranker = CrossEncoderReranker(config.reranker, device=config.device, trust_remote_code=trust_remote_code)
    return RerankedRetriever(retriever, reranker, depth=_RERANK_DEPTH)


def kinds(index: IndexFolder) -> list[str]:
    """Return the kinds of search that an index has the parts for, the best first."""
    parts = index.parts()
    dense, bm25 = "embeddings" in parts or "vectors" in parts, "bm25" in parts
    return ["hybrid"] * (dense and bm25) + ["dense"] * dense + ["bm25"] * bm25


def _open(kind: str, index: IndexFolder, config: RetrievalConfig, trust_remote_code: bool) -> Retriever:
    if kind == "hybrid":
        from reasonrag.retrieval.combined import HybridRetriever

        return HybridRetriever([_open(part, index, config, trust_remote_code) for part in ("bm25", "dense")])
    if kind == "bm25":
        from reasonrag.retrieval.bm25 import BM25Retriever

        return BM25Retriever(index)
    from reasonrag.retrieval.dense import DenseRetriever

    return DenseRetriever(
        index, config.encoder, gpu=config.gpu, device=config.device, trust_remote_code=trust_remote_code
    )
