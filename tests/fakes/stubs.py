"""Servers on loopback that fail as a script says: what may go wrong over HTTP, and a stub retrieval server.

    with StubRetriever(in_turn(Answer(503), None, Disconnect())) as server: ...
    with FakeOpenAI(reply, faults=shares((0.2, Answer(500)), (0.05, HTML), seed=7)) as server: ...

A script is asked for each request and returns the fault that it meets, or None. `FakeOpenAI` is the stub engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from threading import Event
from typing import Any

from aiohttp import web

from tests.serving import HttpServer

Body = Any
"""What a request holds, as JSON."""


class Fault(ABC):
    """Something that a request meets."""

    @abstractmethod
    async def meet(self, request: web.Request) -> web.StreamResponse | None:
        """Return the reply, or None: what follows is the good one."""


@dataclass(frozen=True)
class Answer(Fault):
    """Answer with this status and body instead. `{authorization}` in the body becomes the request's header."""

    status: int = 200
    body: str | bytes = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    async def meet(self, request: web.Request) -> web.StreamResponse:
        body = self.body
        if isinstance(body, str):
            body = body.replace("{authorization}", request.headers.get("Authorization", "no key")).encode()
        return web.Response(status=self.status, body=body, headers=dict(self.headers), content_type=self.content_type)


@dataclass(frozen=True)
class Disconnect(Fault):
    """Close the connection after `sent` bytes of a longer body; with 0, without any answer (a stale keep-alive)."""

    sent: int = 0

    async def meet(self, request: web.Request) -> web.StreamResponse:
        response = await _begun(request, self.sent, {"Content-Length": "1000"})
        if request.transport is not None:
            request.transport.close()
        return response


@dataclass(frozen=True)
class Held(Fault):
    """Answer well, but not before the condition holds."""

    until: Callable[[], bool]

    async def meet(self, request: web.Request) -> None:
        while not self.until():  # noqa: ASYNC110 (another thread may let it go)
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Stuck(Fault):
    """Never answer, or, with `sent`, never go on after so many bytes. The connection stays open."""

    sent: int = 0

    async def meet(self, request: web.Request) -> web.StreamResponse:
        response = await _begun(request, self.sent, {})
        await asyncio.sleep(3600)
        return response


@dataclass(frozen=True)
class Flood(Fault):
    """Answer with a body of so many bytes, blanks if nothing else is said; with None, without an end."""

    size: int | None = None
    status: int = 200
    packed: bool = False  # with gzip: a thousand to one
    piece: bytes = b" " * (1 << 16)

    async def meet(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "application/json"})
        sent = self.piece
        if self.packed:
            response.headers["Content-Encoding"] = "gzip"
            # Flushed fully, a block of deflate may be repeated.
            packer = zlib.compressobj(wbits=-15)
            sent = packer.compress(self.piece) + packer.flush(zlib.Z_FULL_FLUSH)
        await response.prepare(request)
        if self.packed:
            await response.write(b"\x1f\x8b\x08" + bytes(6) + b"\xff")
        pieces = count() if self.size is None else range(self.size // len(self.piece))
        with suppress(ConnectionError, RuntimeError):  # the client has hung up
            for _ in pieces:
                await response.write(sent)
        return response


async def _begun(request: web.Request, sent: int, headers: Mapping[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    if sent:
        await response.prepare(request)
        await response.write(b"{" * sent)
    return response


HTML = Answer(200, "<html><title>Bad gateway</title></html>", content_type="text/html")
CUT_SHORT = Answer(200, '{"choices": [{"message": {"content": "<answer>Ja')

Script = Callable[[Body], Fault | None]


def in_turn(*faults: Fault | None) -> Script:
    """Let the first requests meet these faults, one each."""
    left = iter(faults)
    return lambda body: next(left, None)


def always(fault: Fault) -> Script:
    return lambda body: fault


def shares(*faults: tuple[float, Fault | tuple[Fault, ...]], seed: int = 0) -> Script:
    """Let shares of the requests meet these faults (of several, one after another).

    Whether a request does depends on its content, the seed, and how often it came: one that is sent again may pass, and
    does after three times. Then it has attempts left for a server that is stopped, too.
    """
    came: Counter[bytes] = Counter()
    kinds = [(share, cycle(kind if isinstance(kind, tuple) else (kind,))) for share, kind in faults]

    def script(body: Body) -> Fault | None:
        key = hashlib.sha256(json.dumps([seed, body], sort_keys=True).encode()).digest()
        came[key] += 1
        if came[key] > 3:
            return None
        draw = int.from_bytes(hashlib.sha256(key + bytes([came[key]])).digest()[:8], "big") / 2**64
        for share, kind in kinds:
            if draw < share:
                return next(kind)
            draw -= share
        return None

    return script


class Stub(HttpServer):
    """Answers requests with what its script says, else with `good`; `/health` is well whatever happens.

    Attributes:
        requests: the bodies received, in order.
        paths: their paths.
        headers: their headers.
        arrived_at: their times, `time.monotonic()`.
        met: the faults that they met, None for a good answer.
        in_flight: requests that are being answered.
        most_in_flight: requests that were being answered at once.
        peers: client connections seen.
        latency_s: before every answer and every fault.
    """

    routes: tuple[str, ...] = ("/{path:.*}",)  # that meet the script

    def __init__(self, faults: Script | Iterable[Fault | None] = (), *, port: int = 0, latency_s: float = 0.0) -> None:
        self.requests: list[Body] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.arrived_at: list[float] = []
        self.met: list[Fault | None] = []
        self.peers: set[Any] = set()
        self.in_flight = self.most_in_flight = 0
        self.script = faults if callable(faults) else in_turn(*faults)
        self.latency_s = latency_s
        super().__init__(port)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self._healthy)
        for route in self.routes:
            router.add_route("*", route, self._met)

    @contextmanager
    def holding(self, first: int = 1) -> Iterator[None]:
        """Leave the request of this number and all later ones waiting while the block runs."""
        let_go, script = Event(), self.script
        self.script = lambda body: Held(let_go.is_set) if len(self.requests) >= first else script(body)
        try:
            yield
        finally:
            self.script = script
            let_go.set()

    async def good(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=404)

    async def _healthy(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _met(self, request: web.Request) -> web.StreamResponse:
        self.arrived_at.append(time.monotonic())
        body = await request.json() if request.can_read_body else None
        self.requests.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        fault = self.script(body)
        self.met.append(fault)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            return (await fault.meet(request) if fault else None) or await self.good(request, body)
        finally:
            self.in_flight -= 1


class StubRetriever(Stub):
    """Search-R1's `/retrieve`: the passage with the query's own words, `topk` times, unless `results` says others."""

    def __init__(
        self,
        faults: Script | Iterable[Fault | None] = (),
        *,
        results: Callable[[str, int], list[dict[str, Any]]] | None = None,
        port: int = 0,
        latency_s: float = 0.0,
    ) -> None:
        super().__init__(faults, port=port, latency_s=latency_s)
        self._results = results or (lambda query, top_k: [hit(query)] * top_k)

    async def good(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"result": [self._results(query, body["topk"]) for query in body["queries"]]})


def hit(query: str, score: float = 1.5) -> dict[str, Any]:
    return {"document": {"id": query[:80], "contents": f"T\n{query}"}, "score": score}
