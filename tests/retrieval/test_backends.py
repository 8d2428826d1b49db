"""Search engines of others: each is a real one (a file, a folder, a process, a server on loopback) that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import stamina
import yaml
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field
from qdrant_client import QdrantClient, models

from reasonrag.core.config import Config, RetrievalConfig, load_config
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.pipeline.build import count_calls
from reasonrag.retrieval.backends.frameworks import as_retriever
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.retrieval.open import BACKENDS, open_backend
from reasonrag.storage.journal import Journal
from tests.e2e.product import wait_until
from tests.e2e.world import pages
from tests.faults.stubs import Answer, StubRetriever, in_turn
from tests.ports import keep_port
from tests.retrieval.test_remote import reply, server

__all__ = ["server"]  # a fixture

ROOT = Path(__file__).parents[2]
SEA = [Passage(row["id"], row["contents"]) for row in pages()]
MCP = [sys.executable, "-m", "tests.retrieval.mcp_server"]


def settings(kind: str, *, url: str = "", **backend: Any) -> RetrievalConfig:
    tree = {"kind": kind, "url": [url] if url else [], "backend": backend}
    tree |= {name: backend.pop(name) for name in ("encoder", "timeout_s", "cache", "identity") if name in backend}
    return RetrievalConfig.model_validate(tree)


def asked(retriever: Retriever, *queries: str, top_k: int = 2) -> list[tuple[Passage, ...]]:
    async def ask() -> list[tuple[Passage, ...]]:
        try:
            await retriever.check()  # type: ignore[attr-defined]
            return await retriever.search(queries, top_k)
        finally:
            await retriever.aclose()
            await retriever.aclose()

    return asyncio.run(ask())


def fingerprint(config: RetrievalConfig) -> str:
    retriever = open_backend(config)
    asyncio.run(retriever.aclose())
    return retriever.fingerprint


class WordEncoder:
    """Hashes words into 64 dimensions."""

    name = location = "words"
    dims = 64
    identity: ClassVar = {"checksum": "words"}

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dims), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, sum(map(ord, word)) * len(word) % self.dims] += 1
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1)


ENCODER = "python:tests.retrieval.test_backends:WordEncoder"


@pytest.fixture
def at_once() -> Iterator[None]:
    """Retries do not wait."""
    with stamina.set_testing(True, attempts=20):
        yield


# --- One behaviour of each: it finds, in order, with id and title; an empty query asks nothing ---


def sqlite_file(folder: Path) -> RetrievalConfig:
    path = folder / "sea.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE VIRTUAL TABLE sea USING fts5(id UNINDEXED, title, body)")
        database.executemany("INSERT INTO sea VALUES (?, ?, ?)", [(p.id, p.title, p.text) for p in SEA])
    return settings("sqlite", path=str(path), collection="sea", id="id", text="body")


def qdrant_folder(folder: Path) -> RetrievalConfig:
    client = QdrantClient(path=str(folder / "qdrant"))
    client.create_collection("sea", models.VectorParams(size=64, distance=models.Distance.COSINE))
    vectors = WordEncoder().encode_queries([p.contents for p in SEA]).tolist()
    rows = enumerate(zip(SEA, vectors, strict=True))
    points = [models.PointStruct(id=n, vector=v, payload={"key": p.id, "contents": p.contents}) for n, (p, v) in rows]
    client.upsert("sea", points)
    client.close()
    return settings("qdrant", path=str(folder / "qdrant"), collection="sea", id="key", encoder=ENCODER)


class Words(BaseRetriever):
    """A LangChain retriever that raises its failures first."""

    failures: list[Any] = Field(default_factory=list)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if self.failures:
            raise self.failures.pop(0)
        words = set(query.lower().split())
        found = [p for p in SEA if words & set(p.contents.lower().split())]
        return [Document(p.text, id=p.id, metadata={"title": p.title}) for p in found]


@pytest.mark.parametrize("made", [sqlite_file, qdrant_folder])
def test_a_search_engine_finds_passages_and_an_empty_query_none(
    made: Callable[[Path], RetrievalConfig], tmp_path: Path
) -> None:
    config = made(tmp_path)
    captain, empty, launched = asked(open_backend(config), 'captain "Benna" Ruvik', " ", "Quillfane launched")
    assert captain[0].contents.startswith("Benna Ruvik\nBenna Ruvik was a captain")
    assert captain[0] in [Passage(p.id, p.contents, captain[0].score) for p in SEA]
    assert [len(captain), len(empty), len(launched)] == [2, 0, 2]
    assert launched[0].title == "Quillfane"
    assert fingerprint(config) == fingerprint(config) != fingerprint(config.model_copy(update={"identity": "today's"}))


def test_a_langchain_retriever_and_one_like_llamaindex_are_taken_as_they_are() -> None:
    class Node:
        node_id, metadata = "7", {"title": "Jaws"}

        def get_content(self) -> str:
            return "A film."

    class Scored:
        node, score = Node(), 0.5

    class Index:
        def retrieve(self, query: str) -> list[Scored]:
            return [Scored()] * 3

    (found,) = asked(as_retriever(Words(), RetrievalConfig()), "Quillfane")
    assert found[0] == next(p for p in SEA if p.title == "Quillfane")
    assert asked(as_retriever(Index(), RetrievalConfig()), "x") == [(Passage("7", "Jaws\nA film.", 0.5),) * 2]
    with pytest.raises(ConfigError, match="str is no retriever: it needs the members"):
        as_retriever("langchain", RetrievalConfig())


# --- Failures: retried, then an error, never an empty result ---


@pytest.mark.usefixtures("at_once")
def test_a_retriever_of_others_that_fails_is_asked_again_and_its_bugs_are_not() -> None:
    inner = Words()
    retriever = as_retriever(inner, RetrievalConfig())
    inner.failures = [OSError("busy"), ConnectionError("away")]
    assert asyncio.run(retriever.search(["Quillfane"], 1))[0][0].title == "Quillfane"
    inner.failures = [OSError(f"busy {n}") for n in range(9)]
    with pytest.raises(RetrievalError, match=r"Words gave no answer in 9 attempts; last: OSError \(busy 8\)") as failed:
        asyncio.run(retriever.search(["Quillfane"], 1))
    assert failed.value.cause == "backend"
    inner.failures = [AttributeError("a bug of the user's")]
    with pytest.raises(AttributeError):
        asyncio.run(retriever.search(["Quillfane"], 1))


def test_queries_that_are_asked_one_by_one_do_not_fail_together() -> None:
    class Picky(Words):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            if query == "down":
                raise OSError(query)
            return super()._get_relevant_documents(query, run_manager=run_manager)

    async def ask() -> list[Any]:
        retriever = BatchedRetriever(as_retriever(Picky(), RetrievalConfig()))
        searches = [retriever.search([query], 1) for query in ("Quillfane", "down")]
        return await asyncio.gather(*searches, return_exceptions=True)

    with stamina.set_testing(True, attempts=2):
        ((found,),), failed = asyncio.run(ask())
    assert found.title == "Quillfane"
    assert isinstance(failed, RetrievalError)


def test_documents_without_text_are_an_error_that_names_their_fields(tmp_path: Path) -> None:
    config = qdrant_folder(tmp_path)
    backend = config.backend.model_copy(update={"text": "body"})
    with pytest.raises(RetrievalError, match=r"no text in 'body'; give retrieval.backend.text.*'contents', 'key'"):
        asked(open_backend(config.model_copy(update={"backend": backend})), "Ruvik")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "elastic"}, "retriever 'elastic' is unknown; known: bm25, .*elasticsearch"),
        ({"kind": "elasticsearch", "url": "http://127.0.0.1:9"}, "retrieval.backend.collection"),
        ({"kind": "qdrant", "collection": "sea"}, "retrieval.encoder"),
        ({"kind": "qdrant", "collection": "sea", "encoder": ENCODER}, "retrieval.backend.path"),
        ({"kind": "sqlite", "path": "none.db", "collection": "sea"}, "none.db does not exist"),
        ({"kind": "mcp", "tool": "search"}, "retrieval.backend.command, or retrieval.url"),
        ({"kind": "api", "url": "ftp://h/x"}, "not an http or https address"),
        ({"kind": "api", "url": "http://h/x", "key_env": "NO_KEY"}, "put it into the environment variable NO_KEY"),
        ({"kind": "serper"}, "SERPER_API_KEY"),
    ],
)
def test_what_cannot_work_is_one_line(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        open_backend(settings(**given))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"retriever pgvector needs the package psycopg.*pip install"):
        open_backend(settings("pgvector", url="postgresql://127.0.0.1/sea", collection="sea", encoder=ENCODER))


# --- MCP ---


def test_a_tool_that_fails_or_dies_is_an_error_and_the_next_search_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)

    async def ask() -> None:
        request = {"query": "{query}", "count": "{top_k}"}
        retriever = open_backend(settings("mcp", command=[*MCP, "stdio"], tool="search", request=request))
        async with aclosing(retriever):
            with pytest.raises(RetrievalError, match="the tool search failed") as failed:
                await retriever.search(["fail"], 1)
            assert failed.value.cause == "tool_error"
            with pytest.raises(RetrievalError, match="the session ended") as failed:
                await retriever.search(["die"], 1)
            assert failed.value.cause == "connection"
            assert (await retriever.search(["Quillfane"], 1))[0]

    with stamina.set_testing(True, attempts=1):
        asyncio.run(ask())


def test_a_tool_over_http_that_answers_in_text_gets_the_named_variables_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SEA_KEY", "salt")
    monkeypatch.setenv("OTHER_KEY", "pepper")
    config = settings("mcp", command=[*MCP, "stdio"], tool="read", environment=["SEA_KEY"])
    assert [p.contents for p in asked(open_backend(config), "Tides")[0]] == ["Tides\nsalt no other"]
    kept = keep_port()
    port = kept.getsockname()[1]
    address = f"http://127.0.0.1:{port}/mcp"
    with kept, subprocess.Popen([*MCP, "http", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            config = settings("mcp", url=address, tool="search", request={"query": "{query}", "count": "{top_k}"})
            wait_until(lambda: _listens(port) or process.poll() is not None)
            assert asked(open_backend(config), "Quillfane launched")[0][0].title == "Quillfane"
            named = settings("mcp", url=address, tool="listed", title="headline", text="snippet")
            assert [p.contents for p in asked(open_backend(named), "ships")[0]] == ["Quillfane\nAbout ships."]
            with pytest.raises(ConfigError, match="no tool 'find': it has search, listed, read"):
                asked(open_backend(settings("mcp", url=address, tool="find")), "x")
        finally:
            process.kill()
    with pytest.raises(RetrievalError, match="no answer from mcp: ") as failed:
        asked(open_backend(config), "x")
    assert failed.value.cause == "unreachable"


def test_a_server_of_mcp_that_never_answers_is_not_waited_for_at_the_end():
    async def ask() -> None:
        retriever = open_backend(settings("mcp", command=["sleep", "1000"], tool="search", timeout_s=0.2))
        with pytest.raises(RetrievalError, match=r"no reply in 0\.2 s"):
            await retriever.check()
        async with asyncio.timeout(60):  # the command ends after 1,000 s
            await retriever.aclose()

    asyncio.run(ask())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- JSON over HTTP ---

WEB = {"organic": [{"link": "https://a", "title": "Jaws", "snippet": "A film."}, {"link": "https://b", "title": "x"}]}
HITS = {"hits": {"hits": [{"_id": 7, "_score": 2.5, "_source": {"meta": {"name": "Jaws"}, "text": "A film."}}]}}


def test_elasticsearch_is_asked_for_the_fields_that_are_named(
    server: StubRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_KEY", "ApiKey abc")
    server.script = in_turn(*[reply(HITS)] * 2)
    config = settings(
        "elasticsearch", url=server.url, collection="films", title="meta.name", key_env="SEARCH_KEY", timeout_s=5
    )
    assert asked(open_backend(config), "jaws {top_k}") == [(Passage("7", "Jaws\nA film.", 2.5),)]
    match = {"multi_match": {"query": "jaws {top_k}", "fields": ["meta.name^2", "text"]}}
    assert (server.paths[-1], server.requests[-1]) == ("/films/_search", {"query": match, "size": 2})


@pytest.mark.usefixtures("at_once")
def test_web_search_is_paid_for_once_by_all_runs_and_counted_with_its_price(
    server: StubRetriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "k" * 8)
    leaked = "sk-proj-" + "9f3Ac05b77aA41d2" * 2
    server.script = in_turn(reply(WEB), Answer(503), reply({"organic": [{"link": "c", "snippet": f"Key {leaked}."}]}))
    config = load_config(overrides={"retrieval.backend.price": 2.0})
    serper = settings("serper", url=server.url, cache=str(tmp_path / "cache"), price=2.0)

    async def run(folder: str) -> tuple[list[tuple[Passage, ...]], dict[str, Any]]:
        (tmp_path / folder).mkdir()
        journal = Journal(tmp_path / folder / "journal.sqlite")
        retriever = BatchedRetriever.of_run(open_backend(serper), journal)
        try:
            found = [await retriever.search([query], 2) for query in ("jaws", "jaws", "shark")]
        finally:
            await retriever.aclose()
            calls = count_calls(journal, config)
            journal.close()
        return [ranking for (ranking,) in found], calls

    (jaws, again, _), calls = asyncio.run(run("first"))
    assert jaws == again == (Passage("https://a", "Jaws\nA film."),)
    assert calls == {"paid_search": {"calls": 2, "cost": 0.004}, "search": {"calls": 2}}
    assert server.requests[0] == {"q": "jaws", "num": 2}
    found, calls = asyncio.run(run("second"))
    assert (found[0], calls) == (jaws, {"search": {"calls": 2}})
    assert found[2][0].contents == "Key ***."
    assert not any(leaked.encode() in file.read_bytes() for file in tmp_path.rglob("*.sqlite*"))
    assert len(server.requests) == 3


def test_a_reply_without_the_list_is_an_error_that_says_what_it_holds(server: StubRetriever) -> None:
    server.script = in_turn(reply({"items": [], "total": 0}))
    with pytest.raises(RetrievalError, match=r"no list at 'web.results'.*'items', 'total'"):
        asked(open_backend(settings("api", url=server.url, results="web.results")), "x")


@pytest.mark.usefixtures("at_once")
def test_an_api_that_is_down_is_waited_for_and_a_key_never_stands_in_the_error(
    server: StubRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEA_KEY", "sk-9f3ac05b77aa41d2")
    server.script = in_turn(Answer(401, json.dumps({"error": "bad key sk-9f3ac05b77aa41d2"})))
    config = settings("api", url=server.url, key_env="SEA_KEY")
    with pytest.raises(RetrievalError, match=r"HTTP 401 \(a key was sent; it is read from SEA_KEY\)") as failed:
        asked(open_backend(config), "x")
    assert "9f3ac05b" not in str(failed.value)
    film = reply({"results": ["Jaws is a film."]})
    server.script = in_turn(film, Answer(502), Answer(429), film)
    assert [p.contents for p in asked(open_backend(config), "jaws")[0]] == ["Jaws is a film."]
    assert len(server.requests) == 5


def test_the_settings_of_an_engine_are_part_of_a_run_and_its_address_is_not(tmp_path: Path) -> None:
    def known(**backend: Any) -> str:
        return fingerprint(settings("elasticsearch", collection="films", **backend))

    here = known(url="http://127.0.0.1:9200", price=1.0, cache=str(tmp_path))
    assert here == known(url="http://127.0.0.2:9200") != known(url="http://127.0.0.1:9200", text="body")
    assert Config().retrieval.is_remote is False
    assert settings("mcp").is_remote is RetrievalConfig(url=("http://h",)).is_remote is True


def test_the_settings_that_the_page_shows_can_be_read_as_they_stand() -> None:
    text = (ROOT / "docs" / "your-search.md").read_text(encoding="utf-8")
    kinds = [
        load_config(overrides=yaml.safe_load(block)).retrieval.kind
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    assert kinds == ["elasticsearch", "qdrant", "pgvector", "mcp", "api", "simulated"]
    assert set(re.findall(r"`(\w+)`", text.partition("Their settings")[0])) >= set(BACKENDS)
