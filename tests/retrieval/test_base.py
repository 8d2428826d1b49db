"""Batching: few calls, no query twice, and nobody gets another one's ranking or failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import BatchedRetriever, MemoryStore


class EchoRetriever:
    """Finds one passage, named after the query; can fail, forget a ranking, or take its time."""

    fingerprint = "echo"

    def __init__(self, *, failures: int = 0, forgets: bool = False, delay_s: float = 0.0) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.failures = failures
        self.forgets = forgets
        self.delay_s = delay_s
        self.closed = 0

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        self.calls.append((list(queries), top_k))
        await asyncio.sleep(self.delay_s)
        if self.failures:
            self.failures -= 1
            raise RetrievalError("down", cause="down")
        rankings: list[tuple[Passage, ...]] = [(Passage(query, f"{query} {top_k}"),) for query in queries]
        return rankings[self.forgets :]

    async def aclose(self) -> None:
        self.closed += 1


def test_queries_of_many_tasks_leave_in_one_call() -> None:
    inner = EchoRetriever()
    batched = BatchedRetriever(inner)

    async def ask() -> list[list[tuple[Passage, ...]]]:
        return await asyncio.gather(*(batched.search([f"q{i}"], 3) for i in range(100)))

    results = asyncio.run(ask())
    assert [result[0][0].id for result in results] == [f"q{i}" for i in range(100)]
    assert [len(queries) for queries, _ in inner.calls] == [100]


def test_a_query_is_looked_up_once_also_when_asked_at_the_same_moment() -> None:
    inner = EchoRetriever(delay_s=0.02)
    batched = BatchedRetriever(inner, window_s=0.001)

    async def ask_later() -> list[tuple[Passage, ...]]:
        await asyncio.sleep(0.01)  # the window is over, the lookup is not
        return await batched.search(["a"], 3)

    async def ask() -> None:
        first, second, third = await asyncio.gather(
            batched.search(["a", "b", "a"], 3), batched.search(["a"], 3), ask_later()
        )
        assert first[0] is first[2] is second[0] is third[0]
        assert (await batched.search(["a"], 3))[0] is first[0]

    asyncio.run(ask())
    assert inner.calls == [(["a", "b"], 3)]


def test_an_empty_query_finds_nothing_and_costs_nothing() -> None:
    inner = EchoRetriever()
    batched = BatchedRetriever(inner)
    assert asyncio.run(batched.search(["", " \n"], 3)) == [(), ()]
    assert asyncio.run(batched.search([], 3)) == []
    assert inner.calls == []


def test_a_corpus_in_which_nothing_is_found_is_noticed_once() -> None:
    class Nothing(EchoRetriever):
        async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
            return [() for _ in queries]

    for inner, warnings in ((Nothing(), 1), (EchoRetriever(), 0)):
        with capture_logs() as logged:
            batched = BatchedRetriever(inner)
            for part in range(10):
                asyncio.run(batched.search([f"{part} {number}" for number in range(7)], 3))
        assert [entry["searches"] for entry in logged] == [21] * warnings


def test_a_failure_reaches_all_waiters_and_is_not_kept() -> None:
    inner = EchoRetriever(failures=1)
    batched = BatchedRetriever(inner)

    async def ask() -> None:
        results = await asyncio.gather(*(batched.search([q], 3) for q in "aab"), return_exceptions=True)
        assert all(isinstance(result, RetrievalError) and result.cause == "down" for result in results)
        assert [p[0].id for p in await batched.search(["a", "b"], 3)] == ["a", "b"]

    asyncio.run(ask())
    assert [sorted(queries) for queries, _ in inner.calls] == [["a", "b"]] * 2


def test_a_missing_ranking_is_an_error_and_never_a_shift() -> None:
    with pytest.raises(RetrievalError) as caught:
        asyncio.run(BatchedRetriever(EchoRetriever(forgets=True)).search(["a", "b"], 3))
    assert caught.value.cause == "misaligned"


class Refusing(EchoRetriever):
    """Fails every call in which a query begins with "bad"."""

    def __init__(self, cause: str) -> None:
        super().__init__()
        self.cause = cause

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        rankings = await super().search(queries, top_k)
        if any(query.startswith("bad") for query in queries):
            raise RetrievalError("refused", cause=self.cause)
        return rankings


async def ask_each(batched: BatchedRetriever, queries: Sequence[str]) -> list[str]:
    """What each query found when all are asked at once, or the cause of its failure."""
    results = await asyncio.gather(*(batched.search([query], 3) for query in queries), return_exceptions=True)
    return [r.cause if isinstance(r, RetrievalError) else r[0][0].id for r in results]  # type: ignore[index]


@pytest.mark.parametrize(
    ("cause", "position"), [("http_400", 0), ("http_413", 255), ("misaligned", 128), ("unreadable", 127)]
)
def test_a_refused_query_fails_alone(cause: str, position: int) -> None:
    inner = Refusing(cause)
    batched = BatchedRetriever(inner)
    queries = [f"bad{i}" if i == position else f"q{i}" for i in range(256)]
    found = asyncio.run(ask_each(batched, queries))
    assert found == [cause if query.startswith("bad") else query for query in queries]
    assert len(inner.calls) == 17, "the batch, then two halves on each of 8 levels"


@pytest.mark.parametrize("cause", ["connection", "http_401", "http_503"])
def test_a_server_that_fails_for_any_query_is_asked_once(cause: str) -> None:
    inner = Refusing(cause)
    assert asyncio.run(ask_each(BatchedRetriever(inner), ["bad", "a", "b"])) == [cause] * 3
    assert len(inner.calls) == 1


def test_a_server_that_refuses_whatever_it_is_asked_is_given_up_on() -> None:
    inner = Refusing("unreadable")
    batched = BatchedRetriever(inner)
    assert asyncio.run(ask_each(batched, [f"bad{i}" for i in range(256)])) == ["unreadable"] * 256
    assert len(inner.calls) == 24


def test_who_gives_up_waiting_does_not_stop_the_others() -> None:
    batched = BatchedRetriever(EchoRetriever(delay_s=0.02))

    async def ask() -> None:
        impatient = asyncio.create_task(batched.search(["a"], 3))
        patient = asyncio.create_task(batched.search(["a"], 3))
        await asyncio.sleep(0.01)
        impatient.cancel()
        assert (await patient)[0][0].id == "a"
        assert impatient.cancelled()

    asyncio.run(ask())


def test_a_store_answers_before_the_retriever_and_keeps_what_it_found() -> None:
    store = MemoryStore()
    asyncio.run(store.put({"old": ()}, 3))
    inner = EchoRetriever()
    assert asyncio.run(BatchedRetriever(inner, store=store).search(["old", "new"], 3))[0] == ()
    assert inner.calls == [(["new"], 3)]
    other = EchoRetriever()
    assert asyncio.run(BatchedRetriever(other, store=store).search(["new"], 3)) == [(Passage("new", "new 3"),)]
    assert other.calls == []


def test_a_run_that_was_interrupted_leaves_nothing_to_wait_for() -> None:
    inner = EchoRetriever(delay_s=60)
    batched = BatchedRetriever(inner)

    async def interrupted() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batched.search(["a"], 3), 0.02)

    asyncio.run(interrupted())
    inner.delay_s = 0.0
    assert asyncio.run(batched.search(["a"], 3))[0][0].id == "a"


def test_closing_tells_those_who_wait_and_closes_the_inner_one() -> None:
    inner = EchoRetriever(delay_s=60)
    batched = BatchedRetriever(inner)

    async def ask() -> None:
        waiting = asyncio.create_task(batched.search(["a"], 3))
        await asyncio.sleep(0.01)
        await batched.aclose()
        with pytest.raises(RetrievalError) as caught:
            await waiting
        assert caught.value.cause == "closed"

    asyncio.run(ask())
    assert inner.closed == 1 and batched.fingerprint == "echo"


def test_a_store_with_a_limit_forgets_what_was_not_asked_for_the_longest() -> None:
    store = MemoryStore(2)

    async def fill() -> None:
        for query in ("a", "b", "a", "c"):
            if store.get(query, 1) is None:
                await store.put({query: (Passage(query, query),)}, 1)

    asyncio.run(fill())
    assert [store.get(query, 1) is not None for query in "abc"] == [True, False, True]


def test_a_batch_takes_more_queries_while_it_waits_for_its_turn() -> None:
    class Gate(EchoRetriever):
        async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
            found = await super().search(queries, top_k)
            await opened.wait()
            return found

    inner = Gate()
    opened = asyncio.Event()
    batched = BatchedRetriever(inner, window_s=0, max_batch=8, max_lookups=1)

    async def ask() -> None:
        searches = []
        for number in range(10):
            searches.append(asyncio.create_task(batched.search([f"q{number}"], 1)))
            await asyncio.sleep(0.01)  # each comes when the window of the one before is over
        opened.set()
        assert [rankings[0][0].id for rankings in await asyncio.gather(*searches)] == [f"q{n}" for n in range(10)]

    asyncio.run(ask())
    assert [len(queries) for queries, _ in inner.calls] == [1, 8, 1]


def test_a_secret_in_the_id_of_a_passage_is_redacted_as_one_in_its_text():
    class Signed:
        fingerprint = "signed"

        async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
            return [(Passage("https://x.example/o?access_token=Zq8vT3nL0pXw5RkB7yHd2Mfs", "Jaws"),) for _ in queries]

        async def aclose(self) -> None:
            pass

    async def ask() -> list[tuple[Passage, ...]]:
        batched = BatchedRetriever(Signed(), store=MemoryStore(1))
        try:
            return await batched.search(["jaws"], 1)
        finally:
            await batched.aclose()

    ((passage,),) = asyncio.run(ask())
    assert "Zq8vT3nL" not in passage.id and passage.id.endswith("***")


def test_a_retriever_that_returns_more_than_was_asked_for_is_cut() -> None:
    class Generous(EchoRetriever):
        async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
            return [tuple(Passage(str(place), query) for place in range(50)) for query in queries]

    (found,) = asyncio.run(BatchedRetriever(Generous()).search(["a"], 3))
    assert [passage.id for passage in found] == ["0", "1", "2"]
