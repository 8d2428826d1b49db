"""Questions a minute beside ReasonRAG's published tree builder, on one loopback server that answers after 50 ms.

    python -m benchmarks.official [--questions 512] [--latency 0.05]

The published builder is rebuilt as a model of its calls: 64 iterations a question, one after another, each with a
generation if the selected node can grow and always a call of the judge, on the new node or again on the same terminal
one; UCB1, 2 children, 7 free steps and then a forced answer. The model costs no CPU, has no start-up and searches
nothing; ten processes are ten such clients at once. Ours is `build-tree --preset official` with its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks.stub import parts, questions, server
from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.formats import open_format
from reasonrag.pipeline.build import Build, build_trees
from reasonrag.pipeline.parts import open_llm

ITERATIONS, CHILDREN, FREE_STEPS, C = 64, 2, 7, 1.414
PROMPT = [{"role": "system", "content": "word " * 350}, {"role": "user", "content": "word " * 350}]


@dataclass
class Node:
    """A node of the published builder's tree."""

    parent: Node | None = None
    step: int = 0
    searched: bool = False  # the next step reads passages
    terminal: bool = False
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    @property
    def full(self) -> bool:
        return self.terminal or len(self.children) == CHILDREN

    def score(self) -> float:
        assert self.parent is not None
        return self.value + C * math.sqrt(math.log(self.parent.visits) / self.visits) if self.visits else math.inf


class Client:
    """One connection, one request at a time."""

    def __init__(self, url: str, number: int) -> None:
        self._url = urlsplit(url)
        self._first_seed = number * 1_000_003
        self.calls = 0

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._url.hostname, self._url.port)

    async def ask(self, *stop: str) -> str:
        self.calls += 1
        body = json.dumps({"model": "stub", "messages": PROMPT, "stop": stop, "seed": self._first_seed + self.calls})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write((head + body).encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return json.loads(await self._reader.readexactly(length))["choices"][0]["message"]["content"]

    async def question(self) -> None:
        """Make the calls that the published builder makes for one question."""
        root = Node()
        for _ in range(ITERATIONS):
            node = root
            while node.full and not node.terminal:
                node = max(node.children, key=Node.score)
            if not node.terminal:
                node = await self.grow(node)
            value = float((await self.ask()).rpartition(" ")[2])
            while node is not None:
                node.visits += 1
                node.value += (value - node.value) / node.visits
                node = node.parent

    async def grow(self, parent: Node) -> Node:
        forced = parent.step == FREE_STEPS
        stop = ("</answer>",) if forced else ("</evidence>",) if parent.searched else ("</query>", "</answer>")
        text = await self.ask(*stop)
        child = Node(parent, parent.step + 1, searched="<query>" in text, terminal=forced or "<answer>" in text)
        parent.children.append(child)
        return child


async def published(url: str, processes: int, questions_each: int) -> tuple[float, float]:
    """Return questions a minute, and calls a question."""
    clients = [Client(url, number) for number in range(processes)]

    async def run(client: Client) -> None:
        await client.open()
        for _ in range(questions_each):
            await client.question()

    started = time.perf_counter()
    await asyncio.gather(*map(run, clients))
    count = processes * questions_each
    return 60 * count / (time.perf_counter() - started), sum(client.calls for client in clients) / count


def ours(url: str, count: int) -> tuple[float, float, float]:
    """Return questions a minute by wall and by CPU, and calls a question."""
    overrides = {"policy.spec": url, "policy.model": "stub", "judge.spec": url, "judge.model": "stub"}
    config = load_config(preset="official", overrides=overrides)
    policy = open_llm(config.policy, "policy")
    made = parts(questions(count), open_format(config), policy, judge=policy)
    figures: list[float] = []

    @contextlib.asynccontextmanager
    async def measured(build: Build) -> AsyncIterator[None]:
        started, before = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - started, time.process_time() - before
        figures.extend((60 * count / wall, 60 * count / cpu, build.progress.calls / count))

    with tempfile.TemporaryDirectory() as folder:
        build_trees(config, Path(folder) / "run", parts=made, show=measured)
    by_wall, by_cpu, calls = figures
    return by_wall, by_cpu, calls


def most_in_flight(url: str) -> int:
    with urlopen(f"{url}/models") as reply:
        return int(json.load(reply)["most_in_flight"])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds until a reply")
    given = parser.parse_args()
    table = Table(__doc__)
    with server(given.latency) as url:
        one, calls = asyncio.run(published(url, 1, 2))
        ten, _ = asyncio.run(published(url, 10, 1))
        ours(url, 1)  # imports
        wall, cpu, own_calls = ours(url, given.questions)
        in_flight = most_in_flight(url)
    table.row("published, one process", one, "questions/min")
    table.row("published, ten processes", ten, "questions/min")
    table.row("reasonrag", wall, "questions/min")
    table.row("reasonrag / one process", wall / one, "times", limit=">= 50")
    table.row("reasonrag / ten processes", wall / ten, "times", limit=">= 10")
    table.row("reasonrag with a core of its own", cpu, "questions/min")
    table.row("with a core of its own / one process", cpu / one, "times", limit=">= 50")
    table.row("with a core of its own / ten processes", cpu / ten, "times", limit=">= 10")
    table.row("calls a question, published", calls)
    table.row("calls a question, reasonrag", own_calls)
    table.row("CPU of a call, reasonrag", 60e3 / cpu / own_calls, "ms")
    table.row("most requests in flight, reasonrag", in_flight)
    table.note(
        f"{given.latency * 1e3:.0f} ms a reply, {given.questions} questions; what limits reasonrag is its own CPU"
    )
    table.show(given.json)


if __name__ == "__main__":
    main()
