"""A retrieval server for tests: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from reasonrag.core.types import Passage
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.server import RetrievalApp, ServeSettings, serve
from tests.e2e.world import pages
from tests.serving import ForkedServer
from tests.serving import serving as serving_app

SEA = [Passage(row["id"], row["contents"]) for row in pages()]


class Gated:
    """Searches the sea; a query "held" waits for a file."""

    def __init__(self, inner: Retriever, gate: Path) -> None:
        self.inner, self.gate, self.fingerprint = inner, gate, inner.fingerprint

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        while "held" in queries and not self.gate.exists():  # noqa: ASYNC110 (another process opens the gate)
            await asyncio.sleep(0.005)
        return await self.inner.search(queries, top_k)

    async def aclose(self) -> None:
        await self.inner.aclose()


def sea_index(cache: Path) -> BM25Retriever:
    """The small world of ships."""
    return BM25Retriever.open(SEA, cache=cache)


@contextmanager
def serving(retriever: Retriever, **settings: Any) -> Iterator[int]:
    """A server in a thread; yields its port. The retriever stays open."""
    limits = ServeSettings(**settings)
    with serving_app(RetrievalApp(retriever, limits), close=False) as port:
        yield port


class ServerProcess:
    """`reasonrag index serve`, in a new interpreter; ready when the constructor returns."""

    def __init__(self, cache: Path, port: int = 0) -> None:
        (index,) = cache.glob("bm25-*")
        command = [sys.executable, "-m", "reasonrag", "index", "serve", str(index), "--port", str(port)]
        root = str(Path(__file__).parents[2])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.child.stdout
        self.line = self.child.stdout.readline().strip()
        assert self.line, self.child.communicate(timeout=60)
        self.url = self.line.split()[2]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL, now."""
        self.child.kill()
        self.child.communicate(timeout=60)


class GatedServer(ForkedServer):
    """The product's `serve` in a forked process, which holds queries back; ready when the constructor returns."""

    def __init__(self, folder: Path, gate: Path, *, drain_s: int = 30) -> None:
        super().__init__(folder, lambda: serve(Gated(sea_index(folder), gate), ServeSettings(port=0, drain_s=drain_s)))


def call(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON (or text), and headers in lower case."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        text = response.read().decode()
    kind = response.headers["Content-Type"]
    found = {name.lower(): value for name, value in response.headers.items()}
    return response.status, json.loads(text) if kind == "application/json" else text, found


def ask(port: int, *queries: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    """`POST /retrieve` with scores unless the fields say otherwise."""
    return call(port, "POST", "/retrieve", {"queries": list(queries), "return_scores": True, **fields})


def gauge(port: int, name: str) -> float:
    """The value of a line of /metrics; 0 where it is not there yet."""
    lines = call(port, "GET", "/metrics")[1].splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


def wait_for(port: int, name: str, value: float, timeout_s: float = 60.0) -> None:
    """Return as soon as a line of /metrics has this value."""
    end = time.monotonic() + timeout_s
    while gauge(port, name) != value:
        assert time.monotonic() < end, f"{name} is {gauge(port, name)}, not {value}"
        time.sleep(0.01)


def found(retriever: Retriever, queries: Sequence[str], top_k: int) -> list[list[dict[str, Any]]]:
    """What a search in this process finds, as the server writes it."""
    rankings = asyncio.run(retriever.search(queries, top_k))
    return [[{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in r] for r in rankings]
