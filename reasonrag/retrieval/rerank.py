"""Rerank what a retriever found, with a model that reads query and passage together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Protocol

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.plugins import trusted
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage, as_finite
from reasonrag.core.watch import Worker
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.encoder_models import EncoderFiles, find_files, loading, require_dense
from reasonrag.storage.files import short_hash


class Reranker(Protocol):
    """Scores how well passages answer a query. Called from one thread at a time."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same query and passage may get another score."""
        ...

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        """Return `[len(passages)]` scores, higher is better. Scores of two queries need not be comparable."""
        ...


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, such as cross-encoder/ms-marco-MiniLM-L6-v2."""

    def __init__(
        self,
        name_or_path: str,
        *,
        device: str | None = None,
        max_tokens: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model from the Hub or a folder, to the best device if none is given.

        It reads `max_tokens` tokens of query and passage together, and the rest is cut off; None is the model's limit.

        Raises:
            ConfigError: sentence-transformers is missing, the model cannot be found, or it does not score pairs.
        """
        require_dense(f"reranker {name_or_path!r}", otherwise="leave the reranker out")
        files = find_files(name_or_path)
        _check_head(files)
        with loading(f"reranker {files.name!r}"):
            self._model = import_module("sentence_transformers").CrossEncoder(
                str(files.folder),
                device=device,
                max_length=max_tokens,
                trust_remote_code=trusted(files.name, trust_remote_code),
                local_files_only=True,
            )
        self._model.tokenizer.split_special_tokens = True  # "[SEP]" in a passage is text
        if self._model.num_labels != 1:
            raise ConfigError(
                f"{files.name!r} classifies pairs into {self._model.num_labels} classes; a reranker gives a pair one "
                "score"
            )
        self.fingerprint = short_hash([files.checksum(), max_tokens])

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        """Return `[len(passages)]` logits of any size, higher is better."""
        if not passages:
            return []
        from torch.nn import Identity

        # No sigmoid, because good passages would all become 1.0 in half precision.
        pairs = [(valid_unicode(query), passage.contents) for passage in passages]  # tokenizers refuse lone surrogates
        scores: list[float] = self._model.predict(pairs, activation_fn=Identity(), show_progress_bar=False).tolist()
        return scores


class RerankedRetriever:
    """Reorders the first passages of another retriever."""

    def __init__(self, inner: Retriever, reranker: Reranker, depth: int = 20) -> None:
        """Wrap an open retriever, which is closed with this one.

        Per query, `depth` passages are scored, or `top_k` of a search if that is more.
        """
        self._inner = inner
        self._reranker = reranker
        self._depth = depth
        self._thread = Worker("the reranker")
        self.fingerprint = short_hash([inner.fingerprint, reranker.fingerprint, depth])

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first; equal scores keep the order found.

        Raises:
            RetrievalError: the retriever failed, or the reranker did.
        """
        found = await self._inner.search(queries, max(self._depth, top_k))
        reordered = []
        for query, passages in zip(queries, found, strict=True):
            ordered = await self._thread.call(self._ordered, query, passages)
            reordered.append(ordered[: max(top_k, 0)])
        return reordered

    async def aclose(self) -> None:
        """Wait for the scoring in progress, then close the retriever."""
        await self._thread.aclose()
        await self._inner.aclose()

    def _ordered(self, query: str, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        if not passages:
            return ()
        try:
            scores = self._reranker.score(query, passages)
        except (RuntimeError, MemoryError) as error:
            raise RetrievalError("the reranker failed", quoting=error, cause="rerank") from error
        bad = [as_finite(score) for score in scores].count(None)
        if bad or len(scores) != len(passages):
            raise RetrievalError(
                f"the reranker gave {len(scores)} scores for {len(passages)} passages, {bad} of them not finite",
                cause="rerank",
            )
        scored = [replace(passage, score=score) for passage, score in zip(passages, scores, strict=True)]
        return tuple(sorted(scored, key=lambda passage: -passage.score))


def _check_head(files: EncoderFiles) -> None:
    """Raise if the model was not trained to score pairs: it would get a random head without an error."""
    architectures = files.document("config.json").get("architectures") or []
    if not files.has_modules() and not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        shown = ", ".join(map(str, architectures)) or "no architecture"
        raise ConfigError(
            f"{files.name!r} ({shown}) does not score pairs of texts; choose a cross-encoder as the reranker"
        )
