"""`Retriever`: queries in, ranked passages out; and lookups that many tasks share, each query once."""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from reasonrag.core.errors import RetrievalError
from reasonrag.core.event_loop import Worker
from reasonrag.core.text import redact_data
from reasonrag.core.types import Passage
from reasonrag.storage.files import short_hash
from reasonrag.storage.journal import Journal

if TYPE_CHECKING:
    from reasonrag.retrieval.passages import PassageStore

log = structlog.get_logger()

Ranking = tuple[Passage, ...]

# Failures that one query can cause for its whole batch: refused as malformed,
# forbidden (a firewall reads the text) or too large, or a reply that cannot be
# parsed or matched. A server that is down, busy or moved is not among them.
_CAUSED_BY_A_QUERY = frozenset({"http_400", "http_403", "http_413", "http_422", "misaligned", "refused", "unreadable"})
# One bad query among 256 fails 9 calls before one succeeds.
# This many without a success are the server's fault.
_MOST_FAILURES_IN_A_ROW = 24
PROBE = "Who wrote the first encyclopedia?"  # asked of a server, to see that it answers, and what it finds
_MOST_IN_VAIN = 20  # searches that find nothing, before this is said


class Retriever(Protocol):
    """Finds passages. Safe to call from many tasks at once."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same query may find other passages: a hash of corpus, kind of index and settings."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return `[len(queries)]` rankings of at most `top_k` passages, best first. An empty query finds nothing.

        Raises:
            RetrievalError: all attempts failed.
        """

    async def aclose(self) -> None:
        """Close sockets and files. A second call does nothing."""


class LocalRetriever(ABC):
    """Searches an index in this process, in one thread: one call after another, so that the event loop is free."""

    # Queries times passages of the largest search that the event loop
    # waits for, because handing it to the thread would take longer.
    # Such a search may run while the thread works on another one.
    _at_once = 0

    def __init__(self, passages: PassageStore, *, identity: Any) -> None:
        """Take the passages to return, and a JSON value of everything that decides a ranking, for the fingerprint."""
        self.fingerprint = short_hash(identity)
        self._passages = passages
        self._thread = Worker(type(self).__name__)

    @abstractmethod
    def _search(self, queries: list[str], top_k: int) -> list[Ranking]: ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return rankings as `Retriever` does; raise RetrievalError if the search fails, such as for lack of memory."""
        if len(queries) * len(self._passages) <= self._at_once:
            return self._search(list(queries), top_k)
        return await self._thread.call(self._search, list(queries), top_k)

    async def aclose(self) -> None:
        """Wait for the search in progress, then close thread and files."""
        await self._thread.aclose()
        self._passages.close()


class MemoryStore:
    """Keeps rankings as long as the process lives."""

    def __init__(self, limit: int | None = None) -> None:
        """Keep at most `limit` rankings and drop the least recently used; None keeps all."""
        self._limit = limit
        self._rankings: OrderedDict[tuple[str, int], Ranking] = OrderedDict()

    def get(self, query: str, top_k: int) -> Ranking | None:
        if (query, top_k) in self._rankings:
            self._rankings.move_to_end((query, top_k))
        return self._rankings.get((query, top_k))

    async def put(self, rankings: Mapping[str, Ranking], top_k: int) -> None:
        self._rankings |= {(query, top_k): ranking for query, ranking in rankings.items()}
        while self._limit is not None and len(self._rankings) > self._limit:
            self._rankings.popitem(last=False)


class JournalStore:
    """Keeps the rankings of one retriever in a run's journal, so that a resumed run repeats no search."""

    def __init__(self, journal: Journal, fingerprint: str) -> None:
        self._journal = journal
        self._fingerprint = fingerprint

    def get(self, query: str, top_k: int) -> Ranking | None:
        passages = self._journal.call(self._key(query, top_k))
        return None if passages is None else tuple(Passage(**passage) for passage in passages)

    async def put(self, rankings: Mapping[str, Ranking], top_k: int) -> None:
        """Keep the rankings of one lookup. Returns once they are on disk."""
        replies = {self._key(query, top_k): [*map(asdict, ranking)] for query, ranking in rankings.items()}
        await self._journal.put_calls("search", replies)

    def _key(self, query: str, top_k: int) -> str:
        request = json.dumps(["search", self._fingerprint, query, top_k])
        return hashlib.blake2b(request.encode(), digest_size=16).hexdigest()


class _Batch:
    """The queries that wait for the same lookup."""

    def __init__(self) -> None:
        self.futures: dict[str, list[asyncio.Future[Ranking]]] = {}  # by query: one for each caller
        self.full = asyncio.Event()


class BatchedRetriever:
    """Collects the queries of many trees into few calls of `inner`.

    If a call fails and one of its queries may be the
    cause, the call is halved until only that query fails.
    """

    def __init__(
        self,
        inner: Retriever,
        *,
        window_s: float = 0.002,
        max_batch: int = 256,
        max_lookups: int | None = None,
        store: MemoryStore | JournalStore | None = None,
    ) -> None:
        """Wrap a retriever.

        Args:
            inner: the retriever that is called with whole batches.
            window_s: how long the first query of a batch waits for others.
            max_batch: maximum queries in one call; a full batch leaves at once. The
                queries of one batch wait for each other, and fail together.
            max_lookups: maximum calls of `inner` at a time; None
                means no limit. A waiting batch takes more queries.
            store: keeps the rankings; None keeps them in the memory of this process.
        """
        self._inner = inner
        self.fingerprint = inner.fingerprint
        self._window_s = window_s
        self._max_batch = max_batch
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_lookups) if max_lookups else nullcontext()
        self._store = store if store is not None else MemoryStore()
        self._searches, self._found = 0, False
        self._open: dict[int, _Batch] = {}  # by top_k: batches that still take queries
        self._in_flight: dict[tuple[str, int], list[asyncio.Future[Ranking]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of_run(cls, inner: Retriever, journal: Journal) -> BatchedRetriever:
        """Wrap a retriever for a run; its journal keeps the rankings."""
        if hasattr(inner, "slots"):
            inner.slots.drain(None)  # an earlier run may have been stopped
            journal.at_drain.append(inner.slots.drain)  # as of a model: searches that only wait end
        return cls(inner, store=JournalStore(journal, inner.fingerprint))

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """Return `[len(queries)]` rankings of `inner`.

        Raises:
            RetrievalError: `inner` failed. All tasks that wait for
                this query get the error; a later call tries again.
        """
        rankings = [self._find(query, top_k) for query in queries]
        return [await item if isinstance(item, asyncio.Future) else item for item in rankings]

    async def aclose(self) -> None:
        """Cancel lookups in flight and close the inner retriever."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.aclose()

    def _find(self, query: str, top_k: int) -> Ranking | asyncio.Future[Ranking]:
        if not query.strip():
            return ()
        # Each caller gets its own future: a task that is
        # cancelled must not take the answer from the others.
        future: asyncio.Future[Ranking] = asyncio.get_running_loop().create_future()
        if (query, top_k) in self._in_flight:
            self._in_flight[query, top_k].append(future)
            return future
        if (ranking := self._store.get(query, top_k)) is not None:
            return ranking
        # A batch for each number of passages: a call of `inner` has one.
        if (batch := self._open.get(top_k)) is None:
            batch = self._open[top_k] = _Batch()
            task = asyncio.create_task(self._look_up(batch, top_k))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        batch.futures[query] = self._in_flight[query, top_k] = [future]
        if len(batch.futures) >= self._max_batch:
            self._close(batch, top_k)
        return future

    def _close(self, batch: _Batch, top_k: int) -> None:
        if self._open.get(top_k) is batch:
            del self._open[top_k]
        batch.full.set()

    async def _look_up(self, batch: _Batch, top_k: int) -> None:
        try:
            if self._window_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(batch.full.wait(), self._window_s)
            async with self._turn:
                self._close(batch, top_k)
                await self._answer(batch, top_k)
        except asyncio.CancelledError:
            self._fail(batch, list(batch.futures), top_k, RetrievalError("the lookup was given up", cause="closed"))
            raise
        except Exception as error:
            self._fail(batch, list(batch.futures), top_k, error)
        finally:
            self._close(batch, top_k)

    async def _answer(self, batch: _Batch, top_k: int) -> None:
        """Look up the batch, and halves of a part that fails; an error raised here concerns the remaining queries."""
        waiting_parts = [list(batch.futures)]
        failures_in_a_row = 0
        while waiting_parts:
            queries = waiting_parts.pop()
            try:
                rankings = await self._inner.search(queries, top_k)
                if len(rankings) != len(queries):
                    problem = f"{len(queries)} queries were sent and {len(rankings)} rankings came back"
                    raise RetrievalError(problem, cause="misaligned")
            except RetrievalError as error:
                failures_in_a_row += 1
                if error.cause not in _CAUSED_BY_A_QUERY or failures_in_a_row == _MOST_FAILURES_IN_A_ROW:
                    raise
                if len(queries) == 1:
                    self._fail(batch, queries, top_k, error)
                else:
                    # The first half is looked up next, so queries keep their order.
                    half = len(queries) // 2
                    waiting_parts += [queries[half:], queries[:half]]
                continue
            failures_in_a_row = 0
            self._searches += len(queries)
            self._found |= any(rankings)
            if not self._found and self._searches >= _MOST_IN_VAIN > self._searches - len(queries):
                log.warning("no search has found a passage: is this the right corpus?", searches=self._searches)
            redacted_rankings = [tuple(map(_without_secrets, ranking))[:top_k] for ranking in rankings]
            redacted = dict(zip(queries, redacted_rankings, strict=True))
            await self._store.put(redacted, top_k)
            for query, ranking in redacted.items():
                for future in self._take(batch, query, top_k):
                    future.set_result(ranking)

    def _fail(self, batch: _Batch, queries: list[str], top_k: int, error: Exception) -> None:
        for query in queries:
            for future in self._take(batch, query, top_k):
                future.set_exception(error)
                future.exception()  # marks it as retrieved: asyncio warns about an error that no task awaits

    def _take(self, batch: _Batch, query: str, top_k: int) -> list[asyncio.Future[Ranking]]:
        """Take a query out of its batch, and return the futures of the callers that still wait.

        From now on it is in the store, or another call looks it up again.
        """
        del self._in_flight[query, top_k]
        return [future for future in batch.futures.pop(query) if not future.done()]


def _without_secrets(passage: Passage) -> Passage:
    """Redact a passage before it is kept or used, so that a resumed run reads the same from the journal."""
    id_, contents = redact_data((passage.id, passage.contents), "a passage")
    return replace(passage, id=id_, contents=contents)
