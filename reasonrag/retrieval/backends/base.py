"""What all search engines outside of this process share: parts, retries, HTTP, and passages from their documents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from reasonrag.core.addresses import Addresses
from reasonrag.core.config import BackendConfig, RetrievalConfig
from reasonrag.core.documents import map_texts
from reasonrag.core.errors import ConfigError, ReasonRAGError, RetrievalError
from reasonrag.core.http import Retries, Unavailable, about_key, exchange, is_transient, parse_retry_after, time_limit
from reasonrag.core.plugins import make_plugin
from reasonrag.core.secrets import excerpt
from reasonrag.core.settings import identity
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Passage, as_finite
from reasonrag.retrieval.corpus import passage_contents
from reasonrag.retrieval.encoders import SentenceEncoder, open_text_encoder
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.storage.files import short_hash
from reasonrag.storage.questions import passage_id
from reasonrag.storage.records import text_id

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

Ranking = tuple[Passage, ...]
Find = Callable[[list[str], int], Awaitable[list[Ranking]]]

CHECK_TIMEOUT_S = 10.0
_CLOSE_S = 10.0  # for a library, which may wait for its server
_BUGS = (TypeError, AttributeError, NameError, ImportError, NotImplementedError, AssertionError)
# Of a reply, decompressed: room for one very long document, and for as many long ones as were asked for.
_MOST_BYTES, _MOST_OF_A_PASSAGE = 16 << 20, 64 << 10


class Backend(ABC):
    """A search engine that is asked in parts, several at a time, each with retries, as it may restart meanwhile.

    It belongs to the event loop of its first search until `aclose`.
    """

    checked: tuple[str, ...] = ("check",)  # the queries that `check` asks

    def __init__(
        self,
        name: str,
        fingerprint: str,
        *,
        timeout_s: float,
        max_retries: int = 8,
        deadline_s: float = 300.0,
        concurrency: int = 16,
        max_queries: int = 1,
        urls: Sequence[str] = ("",),
    ) -> None:
        """Store the limits, which `RemoteRetriever` describes; nothing is sent before the first search."""
        self.name = name
        self.fingerprint = fingerprint
        self._timeout_s = timeout_s
        retries = partial(Retries, deadline_s=deadline_s, max_retries=max_retries, first_wait_s=0.125)
        asked = partial(Addresses, retries=retries, patience_s=deadline_s)
        self._addresses = asked(urls, concurrency, name=name, error=RetrievalError)
        self.slots, self.max_queries = self._addresses.slots, max_queries

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return `[len(queries)]` rankings in the engine's order. Empty queries are not sent and find nothing.

        `Passage.score` is 0 if the engine does not say it.

        Raises:
            RetrievalError: no answer in time, the request was refused, or the reply cannot be matched to the queries.
        """
        sent_queries = [valid_unicode(query) for query in queries if query.strip()]
        parts = [sent_queries[i : i + self.max_queries] for i in range(0, len(sent_queries), self.max_queries)]
        requests = [asyncio.ensure_future(self._addresses.ask(partial(self._ask, part, top_k))) for part in parts]
        try:
            replies = await asyncio.gather(*requests)
        finally:
            for request in requests:
                request.cancel()
        rankings = (ranking for reply in replies for ranking in reply)
        return [next(rankings)[:top_k] if query.strip() else () for query in queries]

    async def check(self) -> None:
        """Raise RetrievalError if the engine does not answer a query."""
        failures = []
        for address in self._addresses.all:
            try:
                await self._ask(list(self.checked), 1, None, address.url, CHECK_TIMEOUT_S)
                return
            except Unavailable as failure:
                failures.append(str(failure))
        why = "; ".join(failures)
        raise RetrievalError(f"no answer from {self.name}: {why}; start it, or mend its address", cause="unreachable")

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    async def _attempt(self, url: str, queries: list[str], top_k: int, timeout_s: float) -> list[Ranking]:
        """Return the rankings of one request to a server; raise Unavailable if another attempt may succeed."""

    async def _ask(self, queries: list[str], top_k: int, _: object, url: str, left_s: float) -> list[Ranking]:
        rankings = await self._attempt(url, queries, top_k, min(self._timeout_s, left_s))
        if len(rankings) != len(queries):
            what = f"{self.name}: {len(queries)} queries were asked and {len(rankings)} rankings came back: which"
            raise RetrievalError(f"{what} belongs to which is unknown", cause="misaligned")
        return rankings


class LibraryBackend(Backend):
    """A search engine that is asked through somebody else's library, with errors of its own."""

    def __init__(
        self,
        config: RetrievalConfig,
        find: Find,
        *,
        known: Any = None,
        name: str = "",
        close: Callable[[], Awaitable[object]] | None = None,
        absent: tuple[type[Exception], ...] = (ConnectionError,),
        refusals: tuple[type[Exception], ...] = (),
        **limits: Any,
    ) -> None:
        """Take the coroutine functions that search and close.

        `known` is what decides a ranking beside the settings. Of the errors, those in `absent` say that the engine is
        not there, and is waited for; those in `refusals`, that no other attempt can succeed.
        """
        name = name or str(config.kind)
        super().__init__(name, known_as(config, known), timeout_s=config.timeout_s, **limits)
        self._find, self._close, self._absent, self._refusals = find, close, absent, refusals

    async def aclose(self) -> None:
        if self._close:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._close()

    async def _attempt(self, url: str, queries: list[str], top_k: int, timeout_s: float) -> list[Ranking]:
        try:
            async with time_limit(timeout_s):
                return await self._find(queries, top_k)
        except TimeoutError:
            raise Unavailable(f"no reply in {timeout_s:.1f} s", cause="timeout") from None
        except (Unavailable, ReasonRAGError, *_BUGS):
            raise
        except Exception as raised:
            error = first_of(raised)
            said = f"{type(error).__name__} ({excerpt(str(error))})"
            absent = isinstance(error, self._absent)
            if not absent and isinstance(error, self._refusals):
                raise RetrievalError(f"{self.name} refuses: {said}", cause="refused") from raised
            cause = "connection" if absent else "backend"
            raise Unavailable(said, cause=cause, away=absent, counts=not absent) from raised


class HttpBackend(Backend):
    """A search engine that answers over HTTP."""

    _headers: Mapping[str, str] = {}
    _key_env = "the variable that retrieval.backend.key_env names"
    _session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(self, url: URL, timeout_s: float, passages: int, *, method: str = "POST", **sent: Any) -> bytes:
        """Send a request for so many passages; return the body of the reply.

        Raise Unavailable if the server is away, is busy or fails.
        """
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        limits = timeout_s, _MOST_BYTES + passages * _MOST_OF_A_PASSAGE, "connection"
        reply, body = await exchange(self._session, method, str(url), *limits, **sent)
        status, server = reply.status, f"{url.host}:{url.port}"  # a URL may contain a password
        if is_transient(status):
            wait_s = parse_retry_after(reply.headers.get("Retry-After"))
            what = f"{server} answers HTTP {status}"
            raise Unavailable(what, cause=f"http_{status}", status=status, retry_after_s=wait_s)
        if status != 200:
            said = body.decode(errors="replace")
            what = f"{server} refuses: HTTP {status}{about_key(status, bool(self._headers), self._key_env)}"
            raise RetrievalError(what, quoting=said, cause=f"http_{status}")
        return body


def known_as(config: RetrievalConfig, *more: Any) -> str:
    """Return the fingerprint of what searches as configured: what was said of it, as nobody can look inside."""
    unsaid = identity(BackendConfig())
    said = {name: value for name, value in identity(config.backend).items() if value != unsaid[name]}
    return short_hash([config.kind, config.identity, said, *more])


def needed(value: T | None, config: RetrievalConfig, setting: str) -> T:
    """Return a setting that a kind of retriever cannot do without; raise ConfigError if it is not given."""
    if not value:
        raise ConfigError(f"retriever {config.kind} needs {setting}; docs/your-search.md has an example")
    return value


def query_encoder(config: RetrievalConfig) -> SentenceEncoder:
    """Open the model that made the vectors of the passages; `python:...` names a function that returns one."""
    name = needed(config.encoder, config, "retrieval.encoder, the model that made the vectors")
    if name.startswith("python:"):
        return SentenceEncoder(make_plugin(name, ("identity", "encode_queries")))
    return SentenceEncoder(open_text_encoder(EncoderConfig(name=name, device=config.device)))


def library(name: str, config: RetrievalConfig, package: str) -> Any:
    """Import a library that only some retrievers need; raise ConfigError, which names its package, if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"retriever {config.kind} needs the package {package}; pip install {package!r}") from error


def first_of(error: Exception) -> Exception:
    """Return an error, or the first of a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def key_header(names: BackendConfig) -> dict[str, str]:
    """Return the header with the API key in the variable `names.key_env`; none if no variable is named.

    Raise ConfigError if the variable is not set, or the key cannot be sent.
    """
    key = os.environ.get(names.key_env, "") if names.key_env else ""
    if not key and names.key_env:
        raise ConfigError(f"the search engine needs an API key; put it into the environment variable {names.key_env}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {names.key_env} holds characters that no HTTP header may hold")
    name, _, value = (names.key_header or "Authorization: Bearer {key}").partition(": ")
    return {name: value.replace("{key}", key)} if key else {}


def reach(value: Any, path: str | None) -> Any:
    """Return what lies at a dotted path in JSON, or None.

    >>> reach({"hits": {"title": "Jaws"}}, "hits.title"), reach({}, "hits.title")
    ('Jaws', None)
    """
    for name in filter(None, (path or "").split(".")):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Return JSON with values in place of their names in braces; a text that is only a name becomes the value itself.

    >>> fill({"q": "{query}", "site": ["{query} site:org"], "n": "{top_k}"}, {"query": "Jaws", "top_k": 3})
    {'q': 'Jaws', 'site': ['Jaws site:org'], 'n': 3}
    """
    named = re.compile(rf"\{{({'|'.join(values)})\}}")

    def filled(text: str) -> Any:
        whole = named.fullmatch(text)
        return values[whole[1]] if whole else named.sub(lambda found: str(values[found[1]]), text)

    return map_texts(template, filled)


def documents(reply: Any, names: BackendConfig) -> list[tuple[Any, Any, Any]]:
    """Return id, fields and score of each document in a reply; raise RetrievalError if there is no list of them."""
    found = reach(reply, names.results)
    if not isinstance(found, list):
        what = f"the reply has no list at {names.results!r}; name it as retrieval.backend.results. It holds"
        held = sorted(reply) if isinstance(reply, Mapping) else reply
        raise RetrievalError(what, quoting=held, cause="unreadable")
    rows = [{"text": item} if isinstance(item, str) else item for item in found]
    return [(reach(row, names.id or "id"), reach(row, names.document), reach(row, names.score)) for row in rows]


def ranking(rows: Iterable[tuple[Any, Any, Any]], names: BackendConfig) -> Ranking:
    """Return the passages of (id, fields, score) triples, best first, without those that have no text.

    Raise RetrievalError if none of them has text: the names of the fields are wrong.
    """
    passages, held = [], None
    for id_, fields, score in rows:
        held = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
        whole = None if names.text else reach(fields, "contents")
        texts = {"title": reach(fields, names.title or "title"), "text": reach(fields, names.text or "text")}
        contents = passage_contents({"contents": whole, **texts})
        if contents is not None:
            passages.append(found_passage(id_, contents, score))
    if held is not None and not passages:
        what = f"the documents found have no text in {names.text or 'text'!r}; give retrieval.backend.text. They hold"
        raise RetrievalError(what, quoting=held, cause="unreadable")
    return tuple(passages)


def found_passage(id_: Any, contents: str, score: Any) -> Passage:
    """Return a passage with an id made of its contents if it has none, and the score 0 if it has no finite one."""
    return Passage(text_id(id_) or passage_id(contents), contents, as_finite(score) or 0.0)
