"""Our servers, for the rows that attack them, and requests as bytes."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from reasonrag.agents.environment import CurrentPolicy, EnvironmentApp
from reasonrag.core.serving import App, ListenSettings, run_app
from reasonrag.retrieval.server import RetrievalApp, ServeSettings, serve
from tests.agents.test_environment import QUESTIONS, make
from tests.retrieval.serving import sea_index
from tests.serving import ForkedServer
from tests.toys import ToyRetriever

SERVERS = ("index serve", "env serve")
HOST = b"Host: 127.0.0.1\r\n"
SOCKET = (
    b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


def app(name: str, **settings: Any) -> App:
    """One of the servers."""
    if name == "index serve":
        limits = ServeSettings(port=0, **settings)
        return RetrievalApp(ToyRetriever(), limits)
    return EnvironmentApp(*make("search_r1", CurrentPolicy()), QUESTIONS, ListenSettings(port=0, **settings))


def forked(name: str, folder: Path, **settings: Any) -> ForkedServer:
    """The same in a process; `index serve` has the small world of ships."""

    def run() -> int:
        if name == "index serve":
            return serve(sea_index(folder), ServeSettings(port=0, **settings))
        return run_app(app(name, **settings))

    return ForkedServer(folder, run)


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST " + path + b" HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: %d" % len(body), *headers, b"", body)
    return b"\r\n".join(lines)


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of an answer; status 0 if the connection was closed without one."""
    received = b""
    with suppress(ConnectionError):
        while b"\r\n\r\n" not in received:
            received += (piece := connection.recv(65536))
            if not piece:
                return 0, received
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0] or 0)
        while len(body) < length and (piece := connection.recv(65536)):
            body += piece
        return int(head.split()[1]), body
    return 0, received


def ask(port: int, request: bytes) -> tuple[int, bytes]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        return read_response(connection)


ODD = [
    *(b"null", b"1e999", b"-1", b"NaN", b"99999999999999999999", b"\\u0000", b"true", b'"queries":', b'{"a":'),
    *(b'"\\ud800"', b"\x00", b"\xff", b"\xe2\x80\xa8", b"[[[[[[[[", b'"', b"{}", b"[]", b",", b":"),
    *(b"\r\n", b"\r\n\r\n", b" ", b"\t", b"%00"),
]


def mutated(rng: random.Random, text: bytes) -> bytes:
    """Return a text with up to four bytes or slices of it changed, cut, repeated, or replaced by something odd."""
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(text) + 1)
        end = min(len(text), begin + rng.choice([0, 1, 2, 5, 20]))
        new = rng.choice([b"", rng.choice(ODD), rng.randbytes(1), text[begin:end] * 2, rng.choice(ODD) * 300])
        text = text[:begin] + new + text[end:]
    return text
