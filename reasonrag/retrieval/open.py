"""An index folder to a retriever: by words, by vectors, by both, and reordered by a cross-encoder if asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index.folder import IndexFolder


@dataclass(frozen=True, slots=True)
class OpenSettings:
    """How an index is searched; nothing here is needed for one that was built here.

    Args:
        kind: bm25, dense or hybrid; the best that the index has if None.
        encoder: where the model that built a dense index lies now.
        reranker: a cross-encoder that reorders what was found; None leaves the order.
        rerank_depth: how many passages it reads a query.
        device: of encoder and reranker.
        gpu: search vectors on all GPUs.
        trust_remote_code: run code that comes with an encoder or reranker.
    """

    kind: str | None = None
    encoder: str | None = None
    reranker: str | None = None
    rerank_depth: int = 20
    device: str | None = None
    gpu: bool = False
    trust_remote_code: bool = False


def open_index(path: Path, settings: OpenSettings | None = None) -> Retriever:
    """The index in a folder, checked and ready.

    Raises:
        DataError: it is not there, or a file of it is missing or damaged.
        ConfigError: it has no such kind, or what it needs is not installed.
    """
    settings = settings or OpenSettings()
    index = IndexFolder(path)
    index.need("passages")
    retriever = KINDS[_kind(index, settings.kind)](index, settings)
    if settings.reranker is None:
        return retriever
    from reasonrag.retrieval.rerank import CrossEncoderReranker, RerankedRetriever

    reranker = CrossEncoderReranker(
        settings.reranker, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    return RerankedRetriever(retriever, reranker, depth=settings.rerank_depth)


def kinds(index: IndexFolder) -> list[str]:
    """What an index can be searched by, the best first."""
    parts = index.parts()
    dense, bm25 = "embeddings" in parts or "vectors" in parts, "bm25" in parts
    return ["hybrid"] * (dense and bm25) + ["dense"] * dense + ["bm25"] * bm25


def _kind(index: IndexFolder, wanted: str | None) -> str:
    there = kinds(index)
    if not there:
        raise ConfigError(f"{index.path} has passages and nothing to search them by; run index build with a --kind")
    if wanted is None:
        return there[0]
    if wanted not in there:
        raise ConfigError(f"{index.path} cannot be searched by {wanted!r}; it has {', '.join(there)}")
    return wanted


def _bm25(index: IndexFolder, settings: OpenSettings) -> Retriever:
    from reasonrag.retrieval.bm25 import BM25Retriever

    return BM25Retriever(index)


def _dense(index: IndexFolder, settings: OpenSettings) -> Retriever:
    from reasonrag.retrieval.dense import DenseRetriever

    return DenseRetriever(
        index,
        settings.encoder,
        gpu=settings.gpu,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def _hybrid(index: IndexFolder, settings: OpenSettings) -> Retriever:
    from reasonrag.retrieval.hybrid import HybridRetriever

    return HybridRetriever([_bm25(index, settings), _dense(index, settings)])


KINDS: dict[str, Callable[[IndexFolder, OpenSettings], Retriever]] = {
    "bm25": _bm25,
    "dense": _dense,
    "hybrid": _hybrid,
}
