"""Calls of models and retrievers over HTTP: replies without an end, limits of rate, outages, and what they cost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stub
from reasonrag.core.errors import LLMError, RetrievalError
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.server import ServerLLM
from reasonrag.retrieval.remote import RemoteRetriever
from tests.e2e import product
from tests.e2e.world import write_jsonl
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.stubs import (
    CUT_SHORT,
    HTML,
    Answer,
    Body,
    Disconnect,
    Fault,
    Flood,
    StubRetriever,
    Stuck,
    always,
    in_turn,
    shares,
)
from tests.faults.matrix import Figure, Rounds

PROMPT = Prompt((Message("user", "Who directed Jaws?"),), stop=("</answer>",))
MIB = 1 << 20


def engine(server: FakeOpenAI, **settings: Any) -> ServerLLM:
    return ServerLLM(server.base_url, "fake", **{"backoff_s": 0.01, "timeout_s": 60.0, "patience_s": 60.0, **settings})


async def outcome(call: Coroutine[Any, Any, Any]) -> str:
    """What becomes of a call: `answered`, or the cause of its failure."""
    try:
        await call
    except (LLMError, RetrievalError) as error:
        return error.cause
    return "answered"


class Watch:
    """Memory that this process needed, and the longest time in which its event loop did nothing else."""

    def __enter__(self) -> Watch:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.grown = (self._peak() - self._before) / MIB

    async def over(self, call: Coroutine[Any, Any, str]) -> str:
        self.blocked_s = 0.0
        task = asyncio.ensure_future(call)
        while not task.done():
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.blocked_s = max(self.blocked_s, time.monotonic() - began)
        return await task

    @staticmethod
    def _peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


FLOODS = {
    "200 MB of blanks": Flood(200_000_000),
    "a body without an end": Flood(),
    "600 MB as gzip": Flood(600_000_000, packed=True),
    "an array without an end": Flood(piece=b"[]," * 20_000),
    "an error of 200 MB": Flood(200_000_000, status=500),
    "a refusal as gzip of 600 MB": Flood(600_000_000, status=400, packed=True),
}
CAUSES = {
    "an engine": {200: "bad_reply", 500: "http_500", 400: "refused"},
    "a retriever": {200: "bad_reply", 500: "http_500", 400: "http_400"},
}


@pytest.mark.fault(
    "A3",
    "an engine, a retrieval server, sends 200 MB, 600 MB as gzip, or an endless body, with status 200, 400 or 500",
    "a bad reply (or the error it is) after so many attempts, memory within 64 MB (128 MB), the loop goes on",
    before="2.4 GB and 7.9 GB, the loop blocked for 15 to 52 s",
)
@pytest.mark.parametrize("server_of", CAUSES)
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood(name: str, server_of: str, figure: Figure) -> None:
    async def ask() -> str:
        if isinstance(server, FakeOpenAI):
            async with aclosing(engine(server, max_retries=1)) as llm:
                return await watch.over(outcome(llm.complete(PROMPT, Sampling())))
        async with aclosing(RemoteRetriever(server.url, max_retries=1)) as retriever:
            return await watch.over(outcome(retriever.search(["Jaws"], 3)))

    flood = FLOODS[name]
    stub_class = FakeOpenAI if server_of == "an engine" else StubRetriever
    with stub_class(faults=always(flood)) as server, Watch() as watch:
        cause = asyncio.run(ask())
    figure(f"{name} from {server_of}: {cause}, {watch.grown:.0f} MiB, loop blocked {watch.blocked_s:.2f} s")
    assert (cause, len(server.requests)) == (CAUSES[server_of][flood.status], 1 if flood.status == 400 else 2)
    assert watch.grown < (64 if server_of == "an engine" else 128)


@pytest.mark.fault("12", "Retry-After is 30 years, with 429 and 503", "given up at once: nobody waits that long")
@pytest.mark.fault("14", "an engine that is away says that it is back in 30 years", "given up at once")
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_thirty_years(status: int, figure: Figure) -> None:
    async def ask() -> Counter[str]:
        async with aclosing(engine(server)) as llm:
            async with asyncio.timeout(60):
                return Counter(
                    await asyncio.gather(*(outcome(llm.complete(PROMPT, Sampling(seed=n))) for n in range(9)))
                )

    with FakeOpenAI(faults=always(Answer(status, "", {"Retry-After": "1000000000"}))) as server:
        found = asyncio.run(ask())
    (cause,) = found
    figure(f"{status}: {found[cause]} of 9 calls given up after {len(server.requests)} requests")
    assert found == {{429: "http_429", 503: "unreachable"}[status]: 9}


class Bucket:
    """A limit of rate: so many requests a second, and a few at once. Who comes too often is told when to come again."""

    def __init__(self, rate: float, *, names_time: bool) -> None:
        self.rate, self.left, self.at, self.names_time = rate, rate / 2, time.monotonic(), names_time
        self.not_before: dict[str, float] = {}
        self.early = 0

    def __call__(self, body: Body) -> Fault | None:
        now, key = time.monotonic(), json.dumps(body, sort_keys=True)
        self.early += now < self.not_before.get(key, now)
        self.left = min(self.left + (now - self.at) * self.rate, self.rate / 2)
        self.at = now
        if self.left >= 1:
            self.left -= 1
            return None
        wait_s = 0.25
        if not self.names_time:
            return Answer(429)
        self.not_before[key] = now + wait_s
        return Answer(429, "", {"Retry-After": str(wait_s)})


@pytest.mark.fault(
    "12",
    "429 from a token bucket at a third of the demand, with and without Retry-After",
    "every call answered, none before its Retry-After",
)
@pytest.mark.parametrize("names_time", [True, False], ids=["with Retry-After", "without"])
def test_a_limit_of_rate(names_time: bool, rounds: Rounds, figure: Figure) -> None:
    calls, rate = rounds(60, 1500), rounds(100, 150)

    async def ask(server: FakeOpenAI) -> Counter[str]:
        llm = engine(server, timeout_s=300.0, backoff_s=0.05)
        bucket.at = time.monotonic()
        async with aclosing(llm):
            asked = (outcome(llm.complete(PROMPT, Sampling(seed=seed))) for seed in range(calls))
            return Counter(await asyncio.gather(*asked))

    bucket = Bucket(rate, names_time=names_time)
    with FakeOpenAI(faults=bucket) as server:
        found = asyncio.run(ask(server))
    figure(
        f"{'with' if names_time else 'without'} Retry-After: {found['answered']} of {calls} answered, {bucket.early} "
        f"too early, {len(server.requests) / calls:.1f} requests each"
    )
    assert found == {"answered": calls} and not bucket.early


@pytest.mark.fault(
    "14",
    "2 % of an engine's calls never answer, or stop in the middle of the body",
    "each ends by its deadline and is named; the others are answered; no task and no connection is left",
)
def test_calls_that_never_answer(rounds: Rounds, figure: Figure) -> None:
    calls, slots, deadline_s = rounds(150, 2000), rounds(8, 32), 2.0
    seconds: list[float] = []

    async def timed(llm: ServerLLM, seed: int) -> str:
        began = time.monotonic()
        found = await outcome(llm.complete(PROMPT, Sampling(seed=seed)))
        seconds.append(time.monotonic() - began)
        return found

    async def ask(server: FakeOpenAI) -> tuple[list[str], list[str], int]:
        llm = engine(server, timeout_s=deadline_s, concurrency=slots)
        first = await asyncio.gather(*(timed(llm, seed) for seed in range(calls)))
        server.script = in_turn()  # asked again, none gets stuck
        again = [
            await outcome(llm.complete(PROMPT, Sampling(seed=n))) for n, end in enumerate(first) if end != "answered"
        ]
        await llm.aclose()
        return first, again, len(asyncio.all_tasks()) - 1

    with FakeOpenAI(faults=shares((0.02, (Stuck(), Stuck(sent=20))))) as server:
        first, again, tasks = asyncio.run(ask(server))
        sockets = _connections(server.port)
    stuck = sum(fault is not None for fault in server.met)
    seconds.sort()
    figure(
        f"{stuck} of {len(server.requests)} calls stuck: {Counter(first)['timeout']} ended by the deadline of "
        f"{deadline_s:g} s, {again.count('answered')} of {len(again)} answered when asked again; p99 of a call with "
        f"its wait for a slot {seconds[int(0.99 * calls)]:.2f} s; {tasks} tasks, {sockets} connections left"
    )
    assert Counter(first) == {"answered": calls - stuck, "timeout": stuck} and stuck
    assert again == ["answered"] * stuck and not tasks and not sockets


def _connections(port: int) -> int:
    """Return how many connections of this machine to a port are open."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(remote == f"0100007F:{port:04X}" and state == "01" for _, _, remote, state, *_ in rows)


@pytest.mark.fault(
    "16",
    "an engine is dead behind a healthy /health, and comes back",
    "real calls find out; then one call at a time asks whether it is back; every call is answered",
)
@pytest.mark.parametrize("dead", [Disconnect(), Answer(503, "EngineDeadError")], ids=["no answer", "503"])
def test_an_engine_that_is_dead_behind_a_healthy_front(dead: Fault, rounds: Rounds, figure: Figure) -> None:
    away_s, calls = rounds(1, 20), 200
    died: list[float] = []

    def script(body: Body) -> Fault | None:
        now = time.monotonic()
        if len(server.requests) > 40 and not died:
            died.append(now)
        return dead if died and now < died[0] + away_s else None

    async def ask() -> Counter[str]:
        async with aclosing(engine(server, concurrency=16)) as llm:
            return Counter(
                await asyncio.gather(*(outcome(llm.complete(PROMPT, Sampling(seed=n))) for n in range(calls)))
            )

    with FakeOpenAI(faults=script, latency_s=0.005) as server:
        found = asyncio.run(ask())
    times = [at for at, fault in zip(server.arrived_at, server.met, strict=True) if fault]
    back = [at for at in server.arrived_at if at > died[0] + away_s]
    in_flight = sum(at < died[0] + 0.1 for at in times)
    figure(
        f"{found['answered']} of {calls} answered; {in_flight} calls met it, then {len(times) - in_flight} asked in "
        f"{away_s} s; work went on {min(back) - died[0] - away_s:.1f} s after it was back"
    )
    assert found == {"answered": calls}
    assert len(times) <= 2 * 16 + 10 * away_s


JUNK = (HTML, CUT_SHORT, Disconnect(), Disconnect(sent=20), Flood(), Answer(200, '{"choices": []}'))
FAILURES = tuple(Answer(status, '{"error": {"message": "worker died"}}') for status in (500, 502, 503))


def small_world(folder: Path, count: int) -> tuple[str, ...]:
    """Write so many questions and a corpus; return the flags that name them."""
    asked = [
        {"id": f"q{n}", "question": f"Who directed film {n}?", "golden_answers": ["somebody"]} for n in range(count)
    ]
    corpus = [{"id": f"p{n}", "contents": f"Film {n}\nFilm {n} was directed by somebody."} for n in range(50)]
    questions, passages = write_jsonl(folder / "questions.jsonl", asked), write_jsonl(folder / "corpus.jsonl", corpus)
    return ("--dataset", str(questions), "--corpus", str(passages), "--set", f"retrieval.cache={folder / 'cache'}")


def stub_reply(body: Body) -> str:
    return stub.reply(body.get("stop") or (), body.get("seed") or 0)


@pytest.mark.fault(
    "11",
    "an engine, a retrieval server, fails 20 % of its calls (500, 502, 503), sends junk in 5 % and is down for a time",
    "no question lost, the rows of a clean run",
)
@pytest.mark.fault(
    "15", "5 % of replies cut off, HTML, without an end, or no reply", "asked for again, the rows of a clean run"
)
@pytest.mark.parametrize("failing", ["engine", "retrieval server"])
def test_a_server_that_fails_and_goes_away(failing: str, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    of_engine = failing == "engine"
    count, away_s = rounds(30, 2000 if of_engine else 500), rounds(1, 60 if of_engine else 20)
    flags = small_world(tmp_path, count)[: None if of_engine else 2]
    flags += ("--iterations", "2", "--seed", "7", "--set", "value.rollouts=1")
    died: list[int] = []

    def build(name: str) -> product.Row:
        served = ("--policy", model.base_url, "--policy-model", "fake", "--out", tmp_path / name)
        product.build(*flags, *served, timeout_s=900)
        return product.summary(tmp_path / name)

    def die() -> None:
        product.wait_until(lambda: len(server.requests) > clean_calls + clean_calls // 3, timeout_s=600)
        died.append(len(server.requests))
        server.stop()
        time.sleep(away_s)
        server.start()

    with FakeOpenAI(stub_reply, latency_s=0.02) as model, StubRetriever(latency_s=0.02) as index:
        server = model if of_engine else index
        flags += () if of_engine else ("--retriever-url", index.url)
        clean = build("clean")
        clean_calls = len(server.requests)
        server.script = shares((0.2, FAILURES), (0.05, JUNK), seed=7)
        dying = threading.Thread(target=die)
        dying.start()
        faulty = build("faulty")
        dying.join()
    met = [fault for fault in server.met[clean_calls:] if fault]
    junk = sum(fault in JUNK for fault in met)
    calls, questions = len(server.requests) - clean_calls, faulty["questions"]
    same = [read(tmp_path / "clean") == read(tmp_path / "faulty") for read in (product.tree_rows, product.pair_rows)]
    ratio = (faulty["seconds"] - away_s) / clean["seconds"]
    figure(
        f"{failing}: {count} questions, {calls} calls, {len(met) - junk} failed and {junk} got junk, away {away_s} s: "
        f"{count - questions['finished']} lost, rows {'' if all(same) else 'not '}equal, {calls / clean_calls:.2f} "
        f"times the calls, {ratio:.1f} times the seconds, without those away ({clean['seconds']:.0f} s)"
    )
    assert questions == {"total": count, "finished": count, "failed": {}} and all(same) and died


@pytest.mark.fault(
    "13",
    "an engine and a retriever are not there at the start, or start late",
    "waited for as long as --wait says, with a message; then one line and exit code 2",
)
def test_servers_that_start_late(tmp_path: Path, figure: Figure) -> None:
    flags = (*small_world(tmp_path, 3)[:2], "--iterations", "2", "--wait", "60", "--out", str(tmp_path / "run"))
    with StubRetriever() as index, FakeOpenAI(stub_reply) as model:
        index.stop()
        model.stop()
        served = ("--policy", model.base_url, "--policy-model", "fake", "--retriever-url", index.url)
        never = product.run("build-tree", *flags, *served, "--wait", "0.1")
        child = product.start("build-tree", *flags, *served)
        said = "waiting up to 60 s"
        for number, server in enumerate((model, index), 1):  # the index is looked for once the model answers
            product.wait_until(lambda n=number: child.said().count(said) >= n or child.poll() is not None)
            server.start()
        late = product.warmed.ended(child, 120)
    messages = late.stderr.count(said)
    figure(
        f"late: {messages} messages, then exit code {late.returncode}; never: one line, exit code {never.returncode}"
    )
    assert late.returncode == 0 and messages == 2, late.stderr
    assert never.returncode == 2 and never.stderr.splitlines()[-1].startswith("error: no server answers at")


@pytest.mark.fault(
    "A19",
    "replies of 20 MB, which max_tokens of 131,072 allows",
    "parsed outside the event loop, which answers signals and other questions meanwhile",
    before="60 at once: the event loop stood still for 15 s",
)
def test_large_replies_do_not_block_the_event_loop(figure: Figure) -> None:
    numbers = [0.5] * 4_000_000  # a field that is not read
    large = json.dumps({"choices": [{"message": {"content": "Jaws"}, "finish_reason": "stop"}], "extra": numbers})

    async def ask() -> list[str]:
        async with aclosing(engine(server)) as llm:
            return await asyncio.gather(*(outcome(llm.complete(PROMPT, Sampling(max_tokens=131072))) for _ in range(4)))

    with FakeOpenAI(faults=always(Answer(200, large))) as server:
        began, began_here = time.process_time(), time.thread_time()
        found = asyncio.run(ask())
        here, all_s = time.thread_time() - began_here, time.process_time() - began
    figure(f"{len(found)} replies: {here:.1f} of {all_s:.1f} s of CPU time in the thread of the event loop")
    assert {*found} == {"answered"}
    assert here < all_s / 4, (here, all_s)
