"""The client of a retrieval server, against a real HTTP server that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.retrieval.remote import RemoteRetriever
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import passage_id
from tests.fakes.stubs import HTML, Answer, Disconnect, Fault, Slow, StubRetriever, always, hit, in_turn


def reply(body: object) -> Answer:
    return Answer(200, json.dumps(body))


@pytest.fixture
def server() -> Iterator[StubRetriever]:
    with StubRetriever() as running:
        yield running


def search(urls: str | list[str], queries: list[str], top_k: int = 1, **options: Any) -> list[tuple[Passage, ...]]:
    async def ask() -> list[tuple[Passage, ...]]:
        retriever = RemoteRetriever(urls, **options)
        try:
            return await retriever.search(queries, top_k)
        finally:
            await retriever.aclose()
            await retriever.aclose()

    return asyncio.run(ask())


def failure(urls: str | list[str], queries: list[str], **options: Any) -> RetrievalError:
    with pytest.raises(RetrievalError) as caught:
        search(urls, queries, **options)
    return caught.value


def test_speaks_the_protocol_of_search_r1(server: StubRetriever) -> None:
    assert search(server.url, ["a", "b"], 2) == [(Passage("a", "T\na", 1.5),) * 2, (Passage("b", "T\nb", 1.5),) * 2]
    assert server.paths == ["/retrieve"]
    assert server.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_a_path_in_the_url_is_kept(server: StubRetriever) -> None:
    search(f"{server.url}/v2/find", ["a"])
    assert server.paths == ["/v2/find"]


def test_a_server_that_ignores_return_scores_is_understood(server: StubRetriever) -> None:
    server.script = in_turn(reply({"result": [[{"id": 7, "contents": "T\nx"}], [{"id": "8", "contents": "T\ny"}]]}))
    assert search(server.url, ["a", "b"]) == [(Passage("7", "T\nx"),), (Passage("8", "T\ny"),)]


def test_documents_without_contents_or_id_are_understood(server: StubRetriever) -> None:
    server.script = in_turn(reply({"result": [[{"document": {"title": "T", "text": "x"}, "score": None}]]}))
    assert search(server.url, ["a"]) == [(Passage(passage_id("T\nx"), "T\nx"),)]


def test_empty_queries_are_not_sent_and_keep_their_place(server: StubRetriever) -> None:
    assert [len(ranking) for ranking in search(server.url, ["", "a", " \n", "b"])] == [0, 1, 0, 1]
    assert server.requests[0]["queries"] == ["a", "b"]
    assert search(server.url, [""]) == [()] and search(server.url, []) == []
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503),
        Answer(429, headers={"Retry-After": "0"}),
        Answer(500, "Traceback"),
        Disconnect(),
        Disconnect(sent=12),
        HTML,
        reply({"detail": "still loading"}),
        reply({"result": [[{"document": {"id": "1"}}]]}),
    ],
    ids=["503", "429", "500", "dropped", "cut", "html", "no result", "no contents"],
)
def test_a_passing_fault_is_retried(server: StubRetriever, fault: Fault) -> None:
    server.script = in_turn(fault, fault)
    assert [p.id for p in search(server.url, ["a"])[0]] == ["a"]
    assert len(server.requests) == 3


def test_a_hanging_server_is_given_up_in_time_and_asked_again(server: StubRetriever) -> None:
    server.script = in_turn(Slow(5))
    assert [p.id for p in search(server.url, ["a"], timeout_s=0.5)[0]] == ["a"]


def test_no_wait_goes_beyond_the_deadline(server: StubRetriever) -> None:
    server.script = in_turn(Answer(503, headers={"Retry-After": "3600"}))
    assert failure(server.url, ["a"], deadline_s=1800).cause == "http_503"
    assert len(server.requests) == 1


def test_a_server_that_was_given_up_is_asked_by_the_next_request(server: StubRetriever) -> None:
    async def ask() -> str:
        retriever = RemoteRetriever(server.url)
        with pytest.raises(RetrievalError, match="503"):
            await retriever.search(["given up"], 1)
        async with asyncio.timeout(60):
            (found,) = await search_each(retriever, ["next"])
        return found

    server.script = in_turn(Answer(503, headers={"Retry-After": "1000000000"}))
    assert asyncio.run(ask()) == "next"


def test_one_request_at_a_time_finds_out_whether_a_server_is_back(server: StubRetriever) -> None:
    down = True

    def script(body: object) -> Fault | None:
        return Answer(503, headers={"Retry-After": "0"}) if down else None

    async def ask() -> list[list[tuple[Passage, ...]]]:
        nonlocal down
        retriever = RemoteRetriever(server.url)
        asked = [asyncio.create_task(retriever.search([str(n)], 1)) for n in range(32)]
        # 32 were on their way; then one probe after another.
        while len(server.requests) < 33:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.most_in_flight, server.latency_s = 0, 0.05
        while len(server.requests) < 35:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert server.most_in_flight == 1
        down = False
        found = await asyncio.gather(*asked)
        await retriever.aclose()
        return found

    server.script = script
    assert [rankings[0][0].id for rankings in asyncio.run(ask())] == [str(n) for n in range(32)]


def test_a_server_that_stays_down_is_an_error_with_its_cause(server: StubRetriever) -> None:
    server.script = in_turn(*[Answer(503)] * 3)
    error = failure(server.url, ["a"], max_retries=2)
    assert error.cause == "http_503" and "3 attempts" in str(error)
    server.stop()
    assert failure(server.url, ["a"], deadline_s=0.5).cause == "connection"


def test_a_refused_request_is_not_repeated(server: StubRetriever) -> None:
    server.script = in_turn(Answer(422, "no field\nqueries"))
    error = failure(server.url, ["a"])
    assert error.cause == "http_422" and "\n" not in str(error)
    assert len(server.requests) == 1


def test_what_a_server_says_when_it_refuses_is_shown_without_secrets(server: StubRetriever) -> None:
    server.script = in_turn(Answer(401, "no such user at https://me:hunter2@index/ here"))
    error = failure(server.url, ["a"])
    assert "https://me:***@index/" in str(error)
    assert "refuses: HTTP 401 (no key was sent; it is read from REASONRAG_TOKEN)" in str(error)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_misaligned_reply_is_an_error_and_never_a_shift(server: StubRetriever, count: int) -> None:
    server.script = in_turn(reply({"result": [[hit("x")]] * count}))
    assert failure(server.url, ["a", "b"]).cause == "misaligned"


def test_a_stop_ends_searches_that_wait_and_the_next_run_may_search(server: StubRetriever, tmp_path: Path) -> None:
    async def ask() -> Counter[str]:
        async with aclosing(RemoteRetriever(server.url)) as retriever:
            batched = BatchedRetriever.of_run(retriever, journal)
            asked = [asyncio.create_task(batched.search([str(n)], 1)) for n in range(40)]
            while not retriever.slots.away_since:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            journal.drain()
            async with asyncio.timeout(60):  # patience is 300 s
                ended = await asyncio.gather(*asked, return_exceptions=True)
            server.start()
            assert await BatchedRetriever.of_run(retriever, later).search(["a"], 1)
            return Counter(type(error).__name__ for error in ended)

    journal, later = Journal(tmp_path / "journal.sqlite"), Journal(tmp_path / "later.sqlite")
    server.stop()
    with closing(journal), closing(later):
        assert asyncio.run(ask()) == {"Interrupted": 40}


async def search_each(retriever: RemoteRetriever, queries: list[str]) -> list[str]:
    found = [await retriever.search([query], 1) for query in queries]
    await retriever.aclose()
    return [rankings[0][0].id for rankings in found]


def test_another_server_takes_over_at_once_and_the_failing_one_is_left_alone_for_a_while(server: StubRetriever) -> None:
    other = StubRetriever().start()
    server.script = in_turn(*[Answer(503)] * 10)
    assert asyncio.run(search_each(RemoteRetriever([server.url, other.url]), list("abc"))) == list("abc")
    other.stop()
    assert (len(server.requests), len(other.requests)) == (1, 3)


def test_a_slow_server_gets_fewer_requests(server: StubRetriever) -> None:
    other = StubRetriever().start()

    async def ask() -> None:
        retriever = RemoteRetriever([server.url, other.url])
        with server.holding():
            first = asyncio.create_task(retriever.search(["slow"], 1))
            while not server.requests:  # noqa: ASYNC110 (it is on another thread)
                await asyncio.sleep(0.002)
            for query in "abcd":
                await retriever.search([query], 1)
        await first
        await retriever.aclose()

    asyncio.run(ask())
    other.stop()
    assert (len(server.requests), len(other.requests)) == (1, 4)


def test_many_queries_are_asked_in_several_requests_and_keep_their_places(server: StubRetriever) -> None:
    queries = [f"q{i}" for i in range(10)]
    queries[3] = " "
    found = search(server.url, queries, max_queries=4)
    assert [[p.id for p in ranking] for ranking in found] == [[q] if q.strip() else [] for q in queries]
    assert sorted(len(sent["queries"]) for sent in server.requests) == [1, 4, 4]


def test_a_token_from_the_environment_is_sent_and_never_shown(
    server: StubRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = always(Answer(401, "not you"))
    failure(server.url, ["a"])
    monkeypatch.setenv("A_TOKEN", "canary-1f3a")
    error = failure(server.url, ["a"], token_env="A_TOKEN")
    assert [sent.get("Authorization") for sent in server.headers] == [None, "Bearer canary-1f3a"]
    assert error.cause == "http_401" and "canary" not in str(error)
    monkeypatch.setenv("A_TOKEN", "canary\n1f3a")
    with pytest.raises(ConfigError) as caught:
        RemoteRetriever(server.url, token_env="A_TOKEN")
    assert "canary" not in str(caught.value) and "A_TOKEN" in str(caught.value)


def restart_after(wait_s: float, server: StubRetriever) -> None:
    time.sleep(wait_s)
    server.start()


def test_a_server_that_restarts_is_waited_for_by_time_and_not_by_count() -> None:
    server = StubRetriever().start()
    retriever = RemoteRetriever(server.url, max_retries=1)  # spent on the connection that breaks

    async def ask() -> None:
        assert await retriever.search(["a"], 1)
        server.stop()
        restart = asyncio.get_running_loop().run_in_executor(None, restart_after, 1.0, server)
        assert [p.id for p in (await retriever.search(["b"], 1))[0]] == ["b"]
        await restart
        server.stop()
        await retriever.aclose()

    asyncio.run(ask())


def test_no_more_requests_are_in_flight_than_allowed(server: StubRetriever) -> None:
    async def ask() -> None:
        retriever = RemoteRetriever(server.url, concurrency=3)
        with server.holding():
            searches = [asyncio.create_task(retriever.search([str(i)], 1)) for i in range(12)]
            while server.in_flight < 3:  # noqa: ASYNC110 (it is on another thread)
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)  # in which a fourth one would come
        await asyncio.gather(*searches)
        await retriever.aclose()

    asyncio.run(ask())
    assert server.most_in_flight == 3


def test_invalid_unicode_and_numbers_from_the_server_are_replaced(server: StubRetriever) -> None:
    body = '{"result": [[{"document": {"id": "1", "contents": "a\\ud83d\\u2028b"}, "score": NaN}]]}'
    server.script = in_turn(Answer(200, body))
    assert search(server.url, ["a\ud83d"]) == [(Passage("1", "a?\u2028b", 0.0),)]
    assert server.requests[0]["queries"] == ["a?"]


def test_neither_urls_nor_passwords_show_in_errors_or_fingerprints() -> None:
    secret = "http://user:hunter2@127.0.0.1:9/retrieve?key=hunter2"
    error = failure(secret, ["a"], deadline_s=0.1)
    assert "hunter2" not in str(error) and "127.0.0.1:9" in str(error)
    with capture_logs() as told, StubRetriever() as other:
        assert [p.id for (p,) in search([secret, other.url], list("abcdefgh"), max_queries=1)] == list("abcdefgh")
    (line,) = [entry for entry in told if "the others take its requests" in entry["event"]]
    assert "127.0.0.1:9" in line["url"] and "hunter2" not in str(told)
    with pytest.raises(ConfigError) as caught:
        RemoteRetriever("ftp://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    prints = [
        RemoteRetriever(url, identity=name).fingerprint for url in ("http://a", "http://b") for name in ("x", "y")
    ]
    assert prints[:2] == prints[2:] and prints[0] != prints[1]


@pytest.mark.parametrize("urls", [[], "", "localhost:8000", "http://", ["http://a:b:c"]])
def test_what_is_not_a_url_is_refused(urls: str | list[str]) -> None:
    with pytest.raises(ConfigError):
        RemoteRetriever(urls)


def test_queries_follow_no_redirect_to_a_host_that_nobody_named(server: StubRetriever) -> None:
    with StubRetriever() as other:
        server.script = in_turn(Answer(307, headers={"Location": f"{other.url}/retrieve"}))
        with pytest.raises(RetrievalError, match="refuses: HTTP 307"):
            search(server.url, ["secret"])
        assert other.requests == []
