"""What our own servers do with clients that are slow, broken, greedy or foreign: refuse, and answer everybody else."""

from __future__ import annotations

import contextlib
import json
import random
import select
import signal
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from benchmarks.process import memory_bytes
from reasonrag.core.serving import run_app
from reasonrag.core.types import Passage
from reasonrag.retrieval.server import RetrievalApp, ServeSettings
from tests.e2e import product
from tests.faults.matrix import Figure, Rounds
from tests.faults.servers import HOST, SERVERS, SOCKET, app, ask, forked, mutated, post, read_response
from tests.serving import ForkedServer, serving
from tests.toys import ToyRetriever

MIB = 1 << 20

BIG = 100 * MIB
FOREIGN = {
    "foreign Host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 400),
    "a Host that begins as ours": (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 400),
    "a name with a dot at its end": (b"GET /health HTTP/1.1\r\nHost: localhost.\r\n\r\n", 400),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n" + HOST + b"\r\n", 400),
    "no Host, HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", 400),
    "two lengths": (b"POST /retrieve HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nContent-Length: 1\r\n\r\n{}", 400),
    "a length and chunks": (
        b"POST /retrieve HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a page of another site": (b"GET /health HTTP/1.1\r\n" + HOST + b"Origin: https://evil.example\r\n\r\n", 403),
    "a page without an address": (b"GET /health HTTP/1.1\r\n" + HOST + b"Origin: null\r\n\r\n", 403),
    "a tunnel": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "headers of 65 KiB": (b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * (65 << 10), 431),
    "300 headers": (b"GET /health HTTP/1.1\r\n" + HOST + b"a:\r\n" * 300 + b"\r\n", 431),
}
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LAST_CHUNK = b"POST /retrieve HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\n"
TRAILERS = {
    "1 MB after the last chunk": (LAST_CHUNK + b"X-A: " + b"a" * MIB, 431),
    "300 headers after the last chunk": (LAST_CHUNK + b"a:\r\n" * 300, 431),
}
OWN: dict[str, dict[str, tuple[bytes, int]]] = {
    "index serve": {
        **TRAILERS,
        "10^6 queries": (post(b"/retrieve", b'{"queries":["a"' + b',"a"' * (10**6 - 1) + b"]}"), 413),
        "a body nested 10^6 deep": (post(b"/retrieve", b'{"queries":' + b"[" * 10**6), 422),
    },
    "env serve": {
        "a body where none is read": (b"POST /questions HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n", 405),
        "a socket for a foreign page": (SOCKET + HOST + b"Origin: null\r\n\r\n", 403),
        "a socket by another name": (SOCKET + b"Host: evil.example\r\n\r\n", 403),
        "a socket elsewhere": (SOCKET.replace(b"/ws", b"/health") + HOST + b"\r\n", 403),
        "a socket for two Hosts": (SOCKET + HOST + b"Host: evil.example\r\n\r\n", 403),
    },
}


@pytest.mark.fault(
    "38", "a foreign Host, a page of another site; 10^6 queries of the server that takes them", "refused"
)
@pytest.mark.fault("A8", "headers above 64 KiB; two Hosts", "431; 400", before="90 MB of headers taken; two Hosts: 200")
@pytest.mark.parametrize("name", OWN)
def test_what_is_refused(name: str, tmp_path: Path, figure: Figure) -> None:
    requests = {**FOREIGN, **OWN[name]}
    with serving(app(name)) as port:
        found = {what: ask(port, request)[0] for what, (request, _) in requests.items()}
        for host in (b"127.0.0.1", b"LOCALHOST:%d" % port, b"[::1]:1"):  # names of this machine are answered
            assert ask(port, b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")[0] in (200, 502)
    wrong = {what: status for what, status in found.items() if status != requests[what][1]}
    figure(f"{name}: {len(found) - len(wrong)} of {len(found)} refused, each with the right status")
    assert wrong == {}


# Where 100 MB are sent to, how that is refused, and how they are sent: the head, the first piece, and each piece.
SENT_TO = {"index serve": (b"/retrieve", b" 413 "), "env serve": (b"/", b" 404 ")}
PIECE = b"a" * 65536
BODIES = [(b"Content-Length: %d\r\n\r\n" % BIG, PIECE), (CHUNKED + b"\r\n", b"10000\r\n" + PIECE + b"\r\n")]
MESSAGES = [
    (b"\x81\xff" + struct.pack("!QI", BIG, 0), PIECE),
    (b"\1\x80" + bytes(4), b"\0\xff" + struct.pack("!QI", 65536, 0) + PIECE),
]


def poured(port: int, head: bytes, left: bytes, piece: bytes, refusal: bytes, *, deaf: bool) -> int | None:
    """Return how many bytes went out until refused, or if `deaf` until none could; None if they were taken."""
    sent, answer, is_reset = 0, b"", True
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, suppress(ConnectionError):
        connection.sendall(head)
        answer = b"" if head.startswith(b"POST") else connection.recv(4096)
        connection.setblocking(False)
        while sent < BIG and (deaf or refusal not in answer):
            if select.select([connection], [connection], [], 60)[0]:
                answer += (received := connection.recv(4096))
                if not received:
                    break
            else:
                sent += (count := connection.send(left))
                left = left[count:] or piece
        is_reset = False
    # A reset can overtake the refusal, which the kernel then throws away.
    return sent if refusal in answer or (is_reset and sent < BIG // 4) else None


@pytest.mark.fault(
    "38",
    "100 MB that are sent: as a body of a stated length, in chunks, and to a WebSocket in one frame and in many",
    "refused, in the memory that the largest body may take; others are answered",
)
@pytest.mark.parametrize("name", SERVERS)
def test_100_mb_are_not_taken(name: str, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    largest = 4 * MIB
    server = forked(name, tmp_path, max_body_bytes=largest)
    path, refusal = SENT_TO[name]
    tried = [(b"POST " + path + b" HTTP/1.1\r\n" + HOST, *body, refusal) for body in BODIES]
    if name == "env serve":
        tried += [(SOCKET + HOST + b"\r\n", *message, b"\x03\xf1") for message in MESSAGES]  # closed with 1009
    before, sent, health = memory_bytes("VmHWM", server.process), [], set()
    for stream in tried:
        sent.append(poured(server.port, *stream, deaf=rounds(0, 1) == 1))
        health.add(ask(server.port, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")[0])
    grown = (memory_bytes("VmHWM", server.process) - before) / MIB
    server.send_signal(signal.SIGTERM)
    told = ", ".join("taken" if count is None else f"refused ({count / MIB:.0f} MiB sent)" for count in sent)
    figure(f"{name}: {told}; {grown:.0f} MiB of memory at most")
    assert server.ended() == (143, "")
    assert "taken" not in told and health <= {200, 502}
    assert grown < largest / MIB + 16


@pytest.mark.fault(
    "drain", "SIGTERM or Ctrl-C while clients of `env serve` wait", "sessions end with 1012; exit code, no traceback"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_their_requests(tmp_path: Path, number: signal.Signals, figure: Figure) -> None:
    sessions = forked("env serve", tmp_path)
    with connect(f"ws://127.0.0.1:{sessions.port}/ws") as client:
        client.send('{"type": "reset"}')
        client.recv(timeout=60)
        sessions.send_signal(number)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=60)
    code = 128 + number
    figure(f"{number.name}: sessions ended with {closed.value.rcvd.code}")
    assert closed.value.rcvd.code == 1012
    assert sessions.ended() == (code, "")


RETRIEVE = [
    json.dumps(body).encode()
    for body in (
        {"queries": ["Jaws", "Sælvig ☂"], "topk": 3, "return_scores": True},
        {"queries": [], "topk": None},
        {"queries": ["a" * 50], "return_scores": False, "other": {"a": [1, 2.5, None]}},
    )
]


@pytest.mark.fault(
    "fuzz", "mutated requests, headers and frames, to each server", "an answer or an end; no 500, no hang, no traceback"
)
@pytest.mark.parametrize("name", SERVERS)
def test_mutated_requests(
    name: str, tmp_path: Path, rounds: Rounds, figure: Figure, capfd: pytest.CaptureFixture[str]
) -> None:
    rng, statuses = random.Random(38), Counter[int]()
    frame = b"\x81\x90\0\0\0\0" + b'{"type":"state"}'
    requests = [post(b"/retrieve", RETRIEVE[0]), SOCKET + HOST + b"\r\n", SOCKET + HOST + b"\r\n" + frame * 3]
    requests.append(
        b"GET /health HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n"
        + HOST
        + b"\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with serving(app(name)) as port:
        for number in range(rounds(600, 20_000)):
            body = mutated(rng, rng.choice(RETRIEVE))
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(mutated(rng, rng.choice(requests)) if number % 4 else post(b"/retrieve", body))
                with suppress(OSError):  # it may be ended already
                    connection.shutdown(socket.SHUT_WR)
                statuses[read_response(connection)[0]] += 1
        alive = ask(port, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")[0]
    figure(f"{statuses.total():,} requests to {name}, answered with {shown(statuses)}")
    assert alive == 200 and all(status < 500 for status in statuses)
    assert "Traceback" not in capfd.readouterr().err


def shown(counts: Counter[Any]) -> str:
    """Return statuses or kinds of answers with their counts; status 0 is a connection that was closed without one."""
    return ", ".join(f"{key or 'closed'}: {count:,}" for key, count in sorted(counts.items(), key=str))


@pytest.mark.fault(
    "38",
    "clients that ask for 300 MB of answers and read none",
    "others get 503 meanwhile, and answers once they have gone",
    before="a gigabyte of memory, and no end",
)
def test_clients_that_never_read_fill_no_memory(tmp_path: Path, figure: Figure) -> None:
    class Long(ToyRetriever):
        async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
            return [(Passage("p", "x" * (30 << 20)),) for _ in queries]

    server = ForkedServer(tmp_path, lambda: run_app(RetrievalApp(Long(), ServeSettings(port=0))))
    request = post(b"/retrieve", b'{"queries": ["q"]}')
    healthy = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    with contextlib.ExitStack() as deaf:
        for _ in range(10):
            connection = deaf.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(request)
        product.wait_until(lambda: ask(server.port, healthy)[0] == 503)
    product.wait_until(lambda: ask(server.port, healthy)[0] == 200)
    grown = memory_bytes("VmHWM", server.process) / MIB
    server.send_signal(signal.SIGTERM)
    figure(f"503, then 200; {grown:.0f} MiB of memory at most")
    assert server.ended() == (143, "")
