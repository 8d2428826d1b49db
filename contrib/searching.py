"""What the search plug-ins of this folder share: one query at a time, retries, and passages from documents.

A plug-in reads its own settings from `retrieval.backend`, a mapping without a schema, for example

    reasonrag build-tree --retriever python:contrib.sql:open_sqlite \
        --set retrieval.backend.collection=passages ...

`title`, `text` and `id` name the fields of a document; dots reach into fields of fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import stamina

from reasonrag import Config, ConfigError, Passage, RetrievalError
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import as_finite

Find = Callable[[str, int], Awaitable[Sequence[Passage]]]

# Where a search engine is does not change what it finds, so these options are not part of a run's identity.
_PLACE = ("path", "command", "environment", "key_env", "key_header")


class QueryRetriever:
    """A `reasonrag.Retriever` that asks a search engine for one query at a time, several at once."""

    def __init__(
        self,
        name: str,
        config: Config,
        find: Find,
        *,
        close: Callable[[], Awaitable[object]] | None = None,
        transient: tuple[type[Exception], ...] = (OSError,),
        concurrency: int = 8,
    ) -> None:
        """Take the function that searches. `transient` errors are tried again; the others are bugs and refusals."""
        settings = config.retrieval
        options = {key: value for key, value in settings.backend.items() if key not in _PLACE}
        # The passages cannot be seen from here: users change `retrieval.identity` when their engine gets new ones.
        known = json.dumps([name, settings.identity, settings.encoder, options], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(known.encode()).hexdigest()[:16]
        self._name, self._find, self._close = name, find, close
        self._transient, self._timeout_s = transient, settings.timeout_s
        self._turns = asyncio.Semaphore(concurrency)
        self._answered: dict[tuple[str, int], tuple[Passage, ...]] = {}  # in batches of which another query failed
        self._is_up = False

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        """Return `[len(queries)]` rankings; an empty query finds nothing."""
        known = {query: self._answered.pop((query, top_k), None) for query in queries}
        asked = [query for query, ranking in known.items() if ranking is None]
        found = await asyncio.gather(*(self._search(query, top_k) for query in asked), return_exceptions=True)
        results = zip(asked, found, strict=True)
        answered = {query: result for query, result in results if not isinstance(result, BaseException)}
        self._is_up = bool(answered) or (self._is_up and len(asked) < 2)
        answered |= {query: ranking for query, ranking in known.items() if ranking is not None}
        if failed := next((each for each in found if isinstance(each, BaseException)), None):
            self._answered |= {(query, top_k): ranking for query, ranking in answered.items()}
            if self._is_up and isinstance(failed, RetrievalError):
                # It answers others: the batch is asked again in halves, until this query fails alone.
                raise RetrievalError(str(failed), cause="refused") from failed
            raise failed
        return [answered[query] for query in queries]

    async def aclose(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            await close()

    async def _search(self, query: str, top_k: int) -> tuple[Passage, ...]:
        if not query.strip():
            return ()
        try:
            async for attempt in stamina.retry_context(on=self._transient, attempts=9, timeout=300):
                with attempt:
                    async with self._turns, asyncio.timeout(self._timeout_s):
                        passages = await self._find(query, top_k)
        except TimeoutError as error:
            raise RetrievalError(f"{self._name}: no reply in {self._timeout_s:g} s", cause="timeout") from error
        except self._transient as error:
            raise RetrievalError(f"{self._name} does not answer", quoting=error, cause="connection") from error
        return tuple(passages[:top_k])


def needed(config: Config, name: str) -> Any:
    """Return an option of `retrieval.backend` without which a plug-in cannot work."""
    if not config.retrieval.backend.get(name):
        raise ConfigError(f"retriever {config.retrieval.kind} needs --set retrieval.backend.{name}=...")
    return config.retrieval.backend[name]


def field(document: Any, path: str) -> Any:
    """Return the value at a dotted path, or None.

    >>> field({"_source": {"title": "Jaws"}}, "_source.title")
    'Jaws'
    """
    for name in filter(None, path.split(".")):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def passages_of(documents: Iterable[tuple[Any, Any, Any]], config: Config) -> list[Passage]:
    """Return the passages of (id, fields, score) triples; documents without text are left out.

    Raises:
        RetrievalError: no document has text, so the names of the fields are wrong.
    """
    names = config.retrieval.backend
    passages: list[Passage] = []
    known_fields: object = None
    for id_, fields, score in documents:
        known_fields = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
        title, text = field(fields, names.get("title", "title")), field(fields, names.get("text", "text"))
        if text is None and "text" not in names:  # as in the corpora of Search-R1: title, newline, text
            title, text = None, field(fields, "contents")
        if isinstance(text, str) and text.strip():
            contents = valid_unicode(f"{' '.join(str(title).split())}\n{text}" if title else text)
            text_id = hashlib.sha256(contents.encode(errors="replace")).hexdigest()[:16] if id_ is None else str(id_)
            passages.append(Passage(valid_unicode(text_id), contents, as_finite(score) or 0.0))
    if known_fields is not None and not passages:
        what = f"the documents have no text in {names.get('text', 'text')!r}; set retrieval.backend.text to one of"
        raise RetrievalError(what, quoting=known_fields, cause="unreadable")
    return passages
