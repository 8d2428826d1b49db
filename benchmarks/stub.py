"""A policy, a judge and a retriever that cost next to nothing, in this process or behind a loopback server.

    python -m benchmarks.stub [--latency 0.05]    # prints its address and serves

At a reasoning step it answers with probability .35 (57 % of the answers are right), else it searches; a reply has about
60 tokens. Text and length depend on the seed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.types import Completion, Passage, Prompt, Question
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.build import Build, build_trees
from reasonrag.pipeline.parts import Parts

PROMPT_TOKENS, REPLY_TOKENS = 700, 60

_WORDS = "The question asks who made this film, and the passages so far name a town, a river, a year and a ship. " * 2
_PASSAGE = "A harbour town by the river whose captain founded a company that builds ships and lights. " * 7
_IDS = tuple(range(1_000, 1_000 + PROMPT_TOKENS))
_LOGPROBS = tuple(-((i * 7919) % 1000) / 256 for i in range(REPLY_TOKENS))  # exact in single precision


def questions(count: int, dataset: str = "bench") -> list[Question]:
    return [Question(str(i), f"Who directed film number {i}?", ("somebody",), dataset=dataset) for i in range(count)]


def reply(stop: Sequence[str], seed: int, answers: float = 0.35) -> str:
    """Return the text for a request: a judge's has no stop strings, an answer's only one."""
    draw = (seed * 2654435761 % 2**32) / 2**32
    if not stop:
        return f"{_WORDS}So the score is {draw:.2f}"
    if tuple(stop) == ("</evidence>",):
        return f"{_WORDS}<evidence>{seed} {draw:.6f}</evidence>"
    if tuple(stop) == ("</answer>",) or draw < answers:
        right = seed * 40503 % 100 < 57
        return f"{_WORDS}<answer>{'somebody' if right else f'nobody {seed}'}</answer>"
    return f"{_WORDS}<query>{seed} {draw:.6f}</query>"


@dataclass
class StubPolicy:
    """Answers at once; with `ids`, as vLLM does with token ids and log-probabilities."""

    ids: bool = False
    name: str = "stub"
    calls: int = 0

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        self.calls += 1
        text = reply(prompt.stop, sampling.seed or 0)
        tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": REPLY_TOKENS}
        if not self.ids:
            return Completion(text, **tokens)
        seed = sampling.seed or 0
        written = tuple(range(seed % 100_000, seed % 100_000 + REPLY_TOKENS))
        return Completion(text, token_ids=written, logprobs=_LOGPROBS, prompt_token_ids=_IDS, **tokens)

    async def aclose(self) -> None:
        pass


class StubRetriever:
    """Three passages for any query, at once, with the query's own words in them."""

    fingerprint = "stub"

    async def search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [
            tuple(Passage(f"{query}-{i}", f"Title {i} of {query}\n{_PASSAGE}", 3.0 - i) for i in range(top_k))
            for query in queries
        ]

    async def aclose(self) -> None:
        pass


def parts(asked: list[Question], format: object, policy: object, judge: object = None) -> Parts:
    return Parts(asked, StubRetriever(), format, policy, judge, {})


def built(config: Config, out: Path, given: Parts) -> tuple[Build, dict[str, Any]]:
    """Build trees; return the build and the content of `run.json`."""
    builds: list[Build] = []

    @contextlib.asynccontextmanager
    async def note(build: Build) -> AsyncIterator[None]:
        builds.append(build)
        yield

    summary = build_trees(config, out, parts=given, show=note)
    return builds[0], summary


@contextlib.contextmanager
def server(latency_s: float = 0.0, port: int = 0) -> Iterator[str]:
    """Serve the stub in a process of its own, which is killed at the end; yield its address."""
    command = [sys.executable, "-m", "benchmarks.stub", "--latency", str(latency_s), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and nothing else: a framework would take more CPU than the client that is measured."""

    latency_s = 0.0
    in_flight = most_in_flight = 0  # of all connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.received) < end + 4 + length:
                return
            body, self.received = self.received[end + 4 : end + 4 + length], self.received[end + 4 + length :]
            if not head.startswith(b"post"):
                self._send({"data": [{"id": "stub"}], "most_in_flight": _Connection.most_in_flight})
                continue
            _Connection.in_flight += 1
            _Connection.most_in_flight = max(_Connection.most_in_flight, _Connection.in_flight)
            asyncio.get_running_loop().call_later(self.latency_s, self._answer, body)

    def _answer(self, body: bytes) -> None:
        _Connection.in_flight -= 1
        request = json.loads(body)
        text = reply(request.get("stop") or (), request.get("seed") or 0)
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": REPLY_TOKENS}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        if "prompt" in request:  # as vLLM answers
            ids = {"prompt_token_ids": request["prompt"], "token_ids": list(range(1_000, 1_000 + REPLY_TOKENS))}
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "text": text,
                "logprobs": {"token_logprobs": _LOGPROBS},
                **ids,
            }
        self._send({"object": "chat.completion", "model": "stub", "choices": [choice], "usage": usage})

    def _send(self, reply: object) -> None:
        if self.transport.is_closing():
            return
        raw = json.dumps(reply).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
        self.transport.write(head + raw)


async def _serve(port: int) -> None:
    listening = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds until a reply")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    given = parser.parse_args()
    _Connection.latency_s = given.latency
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.port))
