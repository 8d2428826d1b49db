"""The client of a retrieval server, against a real HTTP server that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.base import BatchedRetriever
from reasonrag.retrieval.remote import RemoteRetriever
from reasonrag.storage.journal import Journal
from reasonrag.storage.questions import passage_id
from tests.fakes.stubs import HTML, Answer, Disconnect, Fault, StubRetriever, always, hit, in_turn


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


def search_each(urls: list[str], queries: str) -> list[tuple[Passage, ...]]:
    """Search for each query in a request of its own, at the same time."""

    async def ask() -> list[tuple[Passage, ...]]:
        async with aclosing(RemoteRetriever(urls)) as retriever:
            return [ranking for (ranking,) in await asyncio.gather(*(retriever.search([q], 1) for q in queries))]

    return asyncio.run(ask())


def failure(urls: str | list[str], queries: list[str], **options: Any) -> RetrievalError:
    with pytest.raises(RetrievalError) as caught:
        search(urls, queries, **options)
    return caught.value


def test_speaks_the_protocol_of_search_r1(server: StubRetriever) -> None:
    assert search(server.url, ["a", "b"], 2) == [(Passage("a", "T\na", 1.5),) * 2, (Passage("b", "T\nb", 1.5),) * 2]
    assert server.paths == ["/retrieve"]
    assert server.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_a_server_that_ignores_return_scores_is_understood(server: StubRetriever) -> None:
    server.script = in_turn(reply({"result": [[{"id": 7, "contents": "T\nx"}], [{"id": "8", "contents": "T\ny"}]]}))
    assert search(server.url, ["a", "b"]) == [(Passage("7", "T\nx"),), (Passage("8", "T\ny"),)]


def test_an_empty_document_is_left_out(server: StubRetriever) -> None:
    server.script = in_turn(reply({"result": [[{"document": {"id": "1", "contents": ""}}, hit("a")]]}))
    assert [p.id for p in search(server.url, ["a"], 2)[0]] == ["a"] and len(server.requests) == 1


def test_documents_without_contents_or_id_are_understood(server: StubRetriever) -> None:
    server.script = in_turn(reply({"result": [[{"document": {"title": "T", "text": "x"}, "score": None}]]}))
    assert search(server.url, ["a"]) == [(Passage(passage_id("T\nx"), "T\nx"),)]


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
        reply({"result": [{}]}),
        reply({"result": {"a": []}}),
        Answer(200, b'{"result": [[{"document": {"id": "1", "contents": "M\xfcller"}}]]}'),
    ],
    ids=["503", "429", "500", "dropped", "cut", "html", "no result", "no contents", "no ranking", "no list", "Latin-1"],
)
def test_a_passing_fault_is_retried(server: StubRetriever, fault: Fault) -> None:
    server.script = in_turn(fault, fault)
    assert [p.id for p in search(server.url, ["a"])[0]] == ["a"]
    assert len(server.requests) == 3


def test_a_server_that_stays_down_is_an_error_with_its_cause(server: StubRetriever) -> None:
    server.script = in_turn(*[Answer(503)] * 3)
    error = failure(server.url, ["a"], max_retries=2)
    assert error.cause == "http_503" and "3 attempts" in str(error)
    server.stop()
    assert failure(server.url, ["a"], deadline_s=0.5).cause == "connection"


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


def test_a_token_from_the_environment_is_sent_and_never_shown(
    server: StubRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = always(Answer(401, "not you"))
    failure(server.url, ["a"])
    monkeypatch.setenv("REASONRAG_TOKEN", "canary-1f3a")
    error = failure(server.url, ["a"])
    assert [sent.get("Authorization") for sent in server.headers] == [None, "Bearer canary-1f3a"]
    assert error.cause == "http_401" and "canary" not in str(error)
    monkeypatch.setenv("REASONRAG_TOKEN", "canary\n1f3a")
    with pytest.raises(ConfigError) as caught:
        RemoteRetriever(server.url)
    assert "canary" not in str(caught.value) and "REASONRAG_TOKEN" in str(caught.value)


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
        assert [p.id for (p,) in search_each([secret, other.url], "abcdefgh")] == list("abcdefgh")
    (line,) = [entry for entry in told if "its requests go to others" in entry["event"]]
    assert "127.0.0.1:9" in line["url"] and "hunter2" not in str(told)
    with pytest.raises(ConfigError) as caught:
        RemoteRetriever("ftp://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    prints = [
        RemoteRetriever(url, identity=name).fingerprint for url in ("http://a", "http://b") for name in ("x", "y")
    ]
    assert prints[:2] == prints[2:] and prints[0] != prints[1]


def test_queries_follow_no_redirect_to_a_host_that_nobody_named(server: StubRetriever) -> None:
    with StubRetriever() as other:
        server.script = in_turn(Answer(307, headers={"Location": f"{other.url}/retrieve"}))
        with pytest.raises(RetrievalError, match="refuses: HTTP 307"):
            search(server.url, ["secret"])
        assert other.requests == []


def test_servers_that_find_different_passages_are_noticed(server: StubRetriever) -> None:
    async def check(*urls: str) -> str:
        async with aclosing(RemoteRetriever(urls)) as retriever:
            return await retriever.check()

    with StubRetriever(results=lambda query, top_k: [hit("of another corpus")]) as other, StubRetriever() as same:
        with capture_logs() as told:
            found = asyncio.run(check(server.url, same.url))
            assert (told, found) == ([], asyncio.run(check(same.url)))
            assert asyncio.run(check(server.url, other.url)) == found
            assert asyncio.run(check(other.url)) != found
        assert ["is their corpus the same?" in entry["event"] for entry in told] == [True]
