"""What our own servers do with clients that are slow, broken, greedy or foreign: refuse, and answer everybody else."""

from __future__ import annotations

import asyncio
import json
import random
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from benchmarks.process import memory_bytes
from tests.faults.matrix import Figure, Rounds
from tests.faults.servers import HOST, SERVERS, SOCKET, app, ask, forked, mutated, post
from tests.retrieval.serving import SEA, found, sea_index
from tests.serving import serving

TOKEN = "canary-5d11"
MIB = 1 << 20

# --- Refusals ---

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
    "headers of 1 MB": (b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: " + b"a" * MIB, 431),
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
    "refusals", "foreign, greedy and malformed requests to each of our servers", "the status that says why"
)
@pytest.mark.fault(
    "38", "a foreign Host, a page of another site; 10^6 queries of the server that takes them", "refused"
)
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
    sent, answer = 0, b""
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
    return sent if refusal in answer else None


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
    "A8",
    "headers without an end; two Hosts",
    "refused after 64 KiB; 400",
    before="90 MB of headers taken; two Hosts: 200",
)
def test_headers_have_a_size(figure: Figure) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
    with serving(app("index serve")) as port:
        both = ask(port, b"GET /health HTTP/1.1\r\nHost: evil.example\r\n" + HOST + b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", port), 60) as greedy:
            sent, refusal = 0, b""
            greedy.sendall(start)
            greedy.settimeout(0.02)
            while not refusal and sent < 4 * MIB:
                greedy.sendall(b"a" * 8192)
                sent += 8192
                with suppress(TimeoutError):
                    refusal = greedy.recv(100)
    figure(f"headers refused after {sent >> 10} KiB; two Hosts: {both}")
    assert refusal.startswith(b"HTTP/1.1 431") and sent <= 128 << 10 and both == 400


# --- Load ---


class Load:
    """64 clients of a server. Of 100 requests one is sent byte by byte, and another is broken in a connection of its
    own; the answers to all others are compared with the library's.
    """

    def __init__(self, port: int, expected: dict[str, bytes]) -> None:
        self.port, self.expected, self.queries = port, expected, list(expected)
        self.requests = self.answers = self.slow = self.broken = self.wrong = 0
        self.rng = random.Random(38)

    async def run(self, seconds: float, process: int) -> list[float]:
        """Return the server's memory in MiB over time."""
        ends_at, memory = time.monotonic() + seconds, [memory_bytes("RssAnon", process) / MIB]
        clients = [asyncio.create_task(self.client(ends_at)) for _ in range(64)]
        while not all(client.done() for client in clients):
            await asyncio.sleep(seconds / 60)
            memory.append(memory_bytes("RssAnon", process) / MIB)
        await asyncio.gather(*clients)
        return memory

    async def client(self, ends_at: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < ends_at or self.requests < 200:
            query = self.rng.choice(self.queries)
            request = post(b"/retrieve", json.dumps({"queries": [query], "return_scores": True}).encode())
            self.requests += 1
            if self.requests % 100 == 33:
                await self.break_off(request)
                continue
            slow = self.requests % 100 == 66
            for start in range(0, len(request), 1 if slow else len(request)):
                writer.write(request[start:][: 1 if slow else None])
                await asyncio.sleep(0.002 if slow else 0)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            self.wrong += body != self.expected[query]
            self.answers += 1
            self.slow += slow
        writer.close()

    async def break_off(self, whole: bytes) -> None:
        rng = self.rng
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        cut = whole[: rng.randrange(len(whole))]
        writer.write(rng.choice([rng.randbytes(300), cut, whole, SOCKET + HOST + b"\r\n", mutated(rng, whole)]))
        if rng.random() < 0.3:  # ends the connection with a reset
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await asyncio.sleep(0.005)
        writer.close()
        self.broken += 1


@pytest.mark.fault(
    "load",
    "64 clients on `index serve` at once, with 1 % of requests slow and 1 % garbage, cut off or reset",
    "each answer is the library's, and memory stays flat",
)
def test_64_clients_with_slow_and_broken_requests(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    seconds = rounds(1, 60)
    words = sorted({word for passage in SEA for word in passage.contents.split()})
    queries = [f"{word} {words[7 * number % len(words)]}" for number, word in enumerate(words)]
    expected = {
        query: json.dumps({"result": [ranking]}, ensure_ascii=False).encode()
        for query, ranking in zip(queries, found(sea_index(tmp_path), queries, 3), strict=True)
    }
    server = forked("index serve", tmp_path)
    load = Load(server.port, expected)
    memory = asyncio.run(load.run(seconds, server.process))
    server.send_signal(signal.SIGTERM)
    third = max(len(memory) // 3, 1)
    first, last = mean(memory[:third]), mean(memory[-third:])
    figure(
        f"{load.wrong} of {load.answers:,} answers wrong in {seconds} s; of {load.requests:,} requests {load.slow:,} "
        f"were slow and {load.broken:,} broken; memory {first:.1f} MiB in the first third, {last:.1f} in the last"
    )
    assert server.ended() == (143, "")
    assert load.wrong == 0 and load.slow and load.broken
    assert last < first + 16


# --- The end ---


@pytest.mark.fault(
    "drain",
    "SIGTERM or Ctrl-C while clients of `env serve` wait",
    "sessions end with 1012; exit code, no traceback",
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
