"""Many tasks, one lookup: queries asked at the same moment travel together, and none is looked up twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

from reasonrag.core.errors import RetrievalError
from reasonrag.core.secrets import redact_data
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever
from reasonrag.storage.journal import Journal

Ranking = tuple[Passage, ...]

# What one query can bring upon all that travel with it: refused as malformed, forbidden (a firewall reads the text) or
# too large, or a reply that cannot be read or matched. A server that is down, busy or elsewhere is not among them.
_CAUSED_BY_A_QUERY = frozenset({"http_400", "http_403", "http_413", "http_422", "misaligned", "unreadable"})
# One bad query among 256 fails 9 calls, then another one succeeds. So many without a success are the server's fault.
_MOST_FAILURES_IN_A_ROW = 24


class SearchStore(Protocol):
    """Keeps rankings, so that a query is looked up once per run (or once ever, if the store outlives the run)."""

    def get(self, query: str, top_k: int) -> Ranking | None:
        """The ranking kept for this query and `top_k`, or None."""
        ...

    async def put(self, rankings: Mapping[str, Ranking], top_k: int) -> None:
        """Keep the rankings of one lookup, by query; returns once they are kept."""
        ...


class MemoryStore:
    """A store that lives as long as the process."""

    def __init__(self, limit: int | None = None) -> None:
        """Keep everything, or at most `limit` rankings: the one not asked for the longest goes first."""
        self._limit = limit
        self._rankings: OrderedDict[tuple[str, int], Ranking] = OrderedDict()

    def get(self, query: str, top_k: int) -> Ranking | None:
        """The ranking kept for this query and `top_k`, or None."""
        found = self._rankings.get((query, top_k))
        if found is not None:
            self._rankings.move_to_end((query, top_k))
        return found

    async def put(self, rankings: Mapping[str, Ranking], top_k: int) -> None:
        """Keep the rankings of one lookup, by query."""
        self._rankings.update({(query, top_k): ranking for query, ranking in rankings.items()})
        while self._limit is not None and len(self._rankings) > self._limit:
            self._rankings.popitem(last=False)


class JournalStore:
    """Keeps the rankings of one retriever in a run's journal, so that a resumed run looks no query up again."""

    def __init__(self, journal: Journal, fingerprint: str) -> None:
        self._journal = journal
        self._fingerprint = fingerprint

    def get(self, query: str, top_k: int) -> Ranking | None:
        kept = self._journal.call(self._key(query, top_k))
        return None if kept is None else tuple(Passage(**passage) for passage in kept)

    async def put(self, rankings: Mapping[str, Ranking], top_k: int) -> None:
        """Keep the rankings of one lookup; returns once they are on disk."""
        writes = []
        for query, ranking in rankings.items():
            passages = [asdict(passage) for passage in ranking]
            writes.append(self._journal.put_call(self._key(query, top_k), "search", passages))
        await asyncio.gather(*writes)

    def _key(self, query: str, top_k: int) -> str:
        request = json.dumps(["search", self._fingerprint, query, top_k])
        return hashlib.blake2b(request.encode(), digest_size=16).hexdigest()


class _Batch:
    """Queries that wait for the same lookup."""

    def __init__(self) -> None:
        self.futures: dict[str, asyncio.Future[Ranking]] = {}
        self.full = asyncio.Event()


class BatchedRetriever:
    """Collects the queries of many trees into few calls of `inner`.

    A call that fails for what one of its queries may have caused is halved until only that query fails.
    `asked` counts the queries that came in (empty ones apart), `looked_up` those that `inner` answered.
    """

    def __init__(
        self,
        inner: Retriever,
        *,
        window_s: float = 0.002,
        max_batch: int = 256,
        max_lookups: int | None = None,
        store: SearchStore | None = None,
    ) -> None:
        """Wrap a retriever.

        Args:
            inner: what finds the passages.
            window_s: how long the first query of a batch waits for others.
            max_batch: queries in one call at most; a full batch leaves at once.
            max_lookups: calls of `inner` at a time; a batch takes more queries while it waits for its turn. None: no
                limit.
            store: keeps the rankings; the memory of this process if None.
        """
        self._inner = inner
        self._window_s = window_s
        self._max_batch = max_batch
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_lookups) if max_lookups else nullcontext()
        self._store = store if store is not None else MemoryStore()
        self._open: dict[int, _Batch] = {}  # by top_k: still taking queries
        self._in_flight: dict[tuple[str, int], asyncio.Future[Ranking]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked = 0
        self.looked_up = 0

    @property
    def fingerprint(self) -> str:
        """That of the inner retriever: batching changes no ranking."""
        return self._inner.fingerprint

    async def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """`[len(queries)]` rankings, as `inner` gives them.

        Raises:
            RetrievalError: `inner` failed. Everybody who waits for that query gets it; the next to ask tries again.
        """
        found: list[Ranking | asyncio.Future[Ranking]] = [self._find(query, top_k) for query in queries]
        # Shielded: who gives up waiting must not take the answer from the others.
        pending = {future: asyncio.shield(future) for future in found if isinstance(future, asyncio.Future)}
        await asyncio.gather(*pending.values())
        return [item.result() if isinstance(item, asyncio.Future) else item for item in found]

    async def aclose(self) -> None:
        """Give up what is still being looked up and close the inner retriever."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.aclose()

    def _find(self, query: str, top_k: int) -> Ranking | asyncio.Future[Ranking]:
        if not query.strip():
            return ()
        self.asked += 1
        known = self._in_flight.get((query, top_k)) or self._store.get(query, top_k)
        return self._enqueue(query, top_k) if known is None else known

    def _enqueue(self, query: str, top_k: int) -> asyncio.Future[Ranking]:
        batch = self._open.get(top_k)
        if batch is None:
            batch = self._open[top_k] = _Batch()
            task = asyncio.create_task(self._look_up(batch, top_k))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        future: asyncio.Future[Ranking] = asyncio.get_running_loop().create_future()
        batch.futures[query] = self._in_flight[query, top_k] = future
        if len(batch.futures) >= self._max_batch:
            self._close(batch, top_k)
        return future

    def _close(self, batch: _Batch, top_k: int) -> None:
        if self._open.get(top_k) is batch:
            del self._open[top_k]
        batch.full.set()

    async def _look_up(self, batch: _Batch, top_k: int) -> None:
        try:
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
        """Ask for the whole batch, and for halves of what fails; an error is that of all queries still waiting."""
        parts = [list(batch.futures)]
        failures_in_a_row = 0
        while parts:
            queries = parts.pop()
            try:
                found = await self._ask(queries, top_k)
            except RetrievalError as error:
                failures_in_a_row += 1
                if error.cause not in _CAUSED_BY_A_QUERY or failures_in_a_row == _MOST_FAILURES_IN_A_ROW:
                    raise
                if len(queries) == 1:
                    self._fail(batch, queries, top_k, error)
                else:
                    half = len(queries) // 2
                    parts += [queries[half:], queries[:half]]
                continue
            failures_in_a_row = 0
            await self._store.put(found, top_k)
            self.looked_up += len(found)
            for query, ranking in found.items():
                self._take(batch, query, top_k).set_result(ranking)

    async def _ask(self, queries: list[str], top_k: int) -> dict[str, Ranking]:
        rankings = await self._inner.search(queries, top_k)
        if len(rankings) != len(queries):
            raise RetrievalError(f"asked for {len(queries)} rankings, got {len(rankings)}", cause="misaligned")
        return {query: tuple(map(_without_secrets, found)) for query, found in zip(queries, rankings, strict=True)}

    def _fail(self, batch: _Batch, queries: list[str], top_k: int, error: Exception) -> None:
        for query in queries:
            future = self._take(batch, query, top_k)
            future.set_exception(error)
            future.exception()  # asyncio would complain of one that nobody waits for any more

    def _take(self, batch: _Batch, query: str, top_k: int) -> asyncio.Future[Ranking]:
        """Who asks for this query from now on starts another lookup, or finds it in the store."""
        del self._in_flight[query, top_k]
        return batch.futures.pop(query)


def _without_secrets(passage: Passage) -> Passage:
    """Redacted before it is kept or read: a run that was killed reads the same from what was kept."""
    contents = redact_data(passage.contents, "a passage")
    return passage if contents is passage.contents else replace(passage, contents=contents)
