"""The retrieval server over real HTTP: Search-R1's protocol to the letter, limits, batches, health."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Passage
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.server import RetrievalApp, ServeSettings, serve
from tests.e2e.product import wait_until
from tests.retrieval.serving import SEA, ask, call, found, gauge, sea_index, serving, wait_for
from tests.toys import ToyRetriever

# Written down from the clients' sources. requests sends these headers and json.dumps' default spacing.
SEARCH_R1 = b"""POST /retrieve HTTP/1.1\r
Host: 127.0.0.1:8000\r
User-Agent: python-requests/2.32.3\r
Accept-Encoding: gzip, deflate\r
Accept: */*\r
Connection: keep-alive\r
Content-Length: 90\r
Content-Type: application/json\r
\r
{"queries": ["captain of Orlandis", "S\\u00e6lvig Star"], "topk": 3, "return_scores": true}"""
URLLIB = b"""POST /retrieve HTTP/1.1\r
Accept-Encoding: identity\r
Content-Length: 60\r
Host: 127.0.0.1:8000\r
User-Agent: Python-urllib/3.11\r
Content-Type: application/json\r
Accept: application/json\r
Connection: close\r
\r
{"queries": ["captain of Orlandis"], "return_scores": false}"""
CURL = b"""POST /retrieve HTTP/1.1\r
Host: localhost:8000\r
User-Agent: curl/8.5.0\r
Accept: */*\r
Content-Length: 36\r
Content-Type: application/x-www-form-urlencoded\r
\r
{"queries": ["captain of Orlandis"]}"""


class Held:
    """Searches the sea once it is let go; may fail."""

    fingerprint = "held"

    def __init__(self, *, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error
        self.batches: list[list[str]] = []

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        self.batches.append(list(queries))
        if self.error is not None:
            raise self.error
        await asyncio.to_thread(self.go.wait, 20)
        return [tuple(SEA[:top_k]) for _ in queries]

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> BM25Retriever:
    return sea_index(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def port(sea: BM25Retriever) -> Iterator[int]:
    with serving(sea) as port:
        yield port


def exchange(port: int, request: bytes) -> Any:
    """The JSON that a request gets, byte by byte as it was recorded."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        return json.loads(response.read())


def as_search_r1_reads_it(result: list[dict[str, Any]]) -> str:
    """`_passages2string` of Search-R1, verl and verl-tool."""
    text = ""
    for number, item in enumerate(result):
        contents = item["document"]["contents"]
        title, *rest = contents.split("\n")
        text += f"Doc {number + 1}(Title: {title}) {chr(10).join(rest)}\n"
    return text


def test_search_r1s_own_request_is_answered_as_its_client_reads_it(port: int, sea: BM25Retriever) -> None:
    result = exchange(port, SEARCH_R1)["result"]
    assert result == found(sea, ["captain of Orlandis", "Sælvig Star"], 3)
    assert [len(ranking) for ranking in result] == [3, 2]
    assert as_search_r1_reads_it(result[1]).startswith("Doc 1(Title: Sælvig Star) Sælvig Star is a sailing ship")


@pytest.mark.parametrize("request_", [URLLIB, CURL], ids=["urllib", "curl"])
def test_without_scores_documents_stand_alone_and_topk_is_the_servers(
    port: int, sea: BM25Retriever, request_: bytes
) -> None:
    documents = [[item["document"] for item in ranking] for ranking in found(sea, ["captain of Orlandis"], 3)]
    assert exchange(port, request_) == {"result": documents}


@pytest.mark.parametrize("name", ["query", "queries"])
def test_one_query_may_stand_alone_as_skyrl_asks(port: int, name: str) -> None:
    status, alone, _ = call(port, "POST", "/retrieve", {name: "captain of Orlandis", "return_scores": True})
    _, listed, _ = call(port, "POST", "/retrieve", {"queries": ["captain of Orlandis"], "return_scores": True})
    assert (status, alone) == (200, listed)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 422, "JSON"),
        (b'"text"', 422, "expected"),
        ({"queries": 7}, 422, "queries"),
        ({"topk": 1}, 422, "queries"),
        ({"queries": ["a", 7]}, 422, "queries: 1"),
        ({"queries": ["a"], "topk": -1}, 422, "topk"),
        ({"queries": ["a"], "topk": True}, 422, "topk"),
        ({"queries": ["a"], "topk": 1001}, 422, "topk"),
        ({"queries": ["a"], "return_scores": "perhaps"}, 422, "return_scores"),
        ({"queries": ["a"] * 101, "topk": 1000}, 413, "at most 100000 passages"),
        (b"[" * 100_000, 422, "JSON"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(port: int, body: Any, status: int, said: str) -> None:
    found_status, refusal, _ = call(port, "POST", "/retrieve", body)
    assert found_status == status
    assert said in refusal["detail"] and "\n" not in refusal["detail"]


async def together(port: int, *bodies: dict[str, Any]) -> list[int]:
    """Statuses of requests that are sent at the same moment."""

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> int:
        async with session.post(f"http://127.0.0.1:{port}/retrieve", json=body) as response:
            return response.status

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


def test_a_full_queue_says_when_to_come_back_and_a_slow_index_answers_all_it_took() -> None:
    retriever = Held()

    async def overload(port: int) -> list[int]:
        taken = [asyncio.create_task(together(port, {"queries": [f"a{i}", f"b{i}"]})) for i in range(5)]
        await asyncio.to_thread(wait_for, port, "reasonrag_retrieval_queue", 10)
        status, refusal, headers = await asyncio.to_thread(ask, port, "one too many")
        assert (status, headers["retry-after"]) == (503, "1") and "queue is full" in refusal["detail"]
        retriever.go.set()
        return [status for statuses in await asyncio.gather(*taken) for status in statuses]

    with serving(retriever, max_queue=10) as port:
        assert asyncio.run(overload(port)) == [200] * 5
        assert gauge(port, "reasonrag_retrieval_queue") == gauge(port, "reasonrag_retrieval_requests_in_flight") == 0
        assert ask(port, *"abcdefghijkl")[0] == 200  # more than the queue holds, and nobody else is there


def test_a_query_over_the_limit_is_cut() -> None:
    retriever = ToyRetriever()
    with serving(retriever) as port:
        assert ask(port, "0" * 5000, "short")[0] == 200
    assert retriever.queries == ["0" * 4096, "short"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RetrievalError("no way to /secret/path", cause="disk"), 503, "disk"),
        (KeyError("/secret/path"), 500, "KeyError"),
    ],
)
def test_a_failing_index_is_said_without_its_insides(
    error: Exception, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(Held(error=error)) as port:
        found_status, refusal, _ = ask(port, "hush hush")
        assert found_status == status and said in refusal["detail"] and "secret" not in refusal["detail"]
        found_status, refusal, _ = call(port, "GET", "/health")
        assert found_status == 503 and said in refusal["detail"] and "secret" not in refusal["detail"]
    out = "".join(capfd.readouterr())
    assert "secret" not in out and "hush" not in out and "Traceback" not in out


def test_health_is_false_when_no_query_answers_in_time() -> None:
    retriever = Held()
    with serving(retriever, health_timeout_s=0.1) as port:
        status, refusal, _ = call(port, "GET", "/health")
        assert status == 503 and "0.1 s" in refusal["detail"]
        retriever.go.set()
        wait_until(lambda: call(port, "GET", "/health")[0] == 200)


def test_health_is_false_while_the_server_drains() -> None:
    async def probe() -> None:
        app = RetrievalApp(ToyRetriever(), ServeSettings())
        await app.start()
        app.drain()
        await app.start()

    with pytest.raises(RetrievalError, match="draining"):
        asyncio.run(probe())


def test_a_port_that_is_taken_is_said_in_one_line(port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on") as caught:
        serve(ToyRetriever(), ServeSettings(port=port))
    assert "\n" not in str(caught.value)


def test_an_index_that_answers_no_query_is_not_served() -> None:
    with pytest.raises(RetrievalError, match="cannot be served"):
        serve(Held(error=RetrievalError("gone", cause="disk")), ServeSettings(port=0))
