"""Servers that die and come back under a run: their port and every connection is closed, as after a SIGKILL."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from threading import Event

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Caller, Sampling, caller
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.server import ServerLLM
from reasonrag.storage.journal import Journal
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.stubs import Answer, Fault, Held, always

PROMPT = Prompt((Message("user", "Who directed Jaws?"),))


class Server(FakeOpenAI):
    """Answers with its port."""

    def __init__(self, latency_s: float = 0.02) -> None:
        super().__init__(lambda request: str(self.port), models=("m",), latency_s=latency_s)


async def ask(llm: ServerLLM, question: str, calls: int, replied: Callable[[str, str], None]) -> None:
    caller.set(Caller(question))
    for _ in range(calls):
        reply = await llm.complete(PROMPT, Sampling())
        replied(question, reply.text)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [429, 500])
def test_a_stop_ends_waits_for_retries_and_lets_what_was_sent_end(status, tmp_path):
    async def main(server: Server, journal: Journal) -> Counter[str]:
        inner = ServerLLM(server.base_url, "m", concurrency=200)
        async with aclosing(JournaledLLM(inner, journal, kind="policy")) as llm:
            asked = [asyncio.create_task(llm.complete(PROMPT, Sampling(seed=i))) for i in range(300)]
            await until(lambda: len(server.requests) == (200 if status == 429 else 300))
            journal.drain()
            journal.drain()  # as by a second cause
            async with asyncio.timeout(60):  # the server says to wait for 100 s
                await until(lambda: sum(task.done() for task in asked) == 299)
            let_go.set()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert (llm.slots.in_flight, llm.slots.waiting) == (0, 0)
            return Counter(type(each).__name__ for each in ended)

    def script(request: object) -> Fault:
        return Answer(status, "", {"Retry-After": "100"}) if len(server.requests) > 1 else Held(let_go.is_set)

    let_go = Event()
    with Server() as server:
        server.script = script
        journal = Journal(tmp_path / "journal.sqlite")
        assert asyncio.run(main(server, journal)) == {"Completion": 1, "Interrupted": 299}
        journal.close()


def test_of_three_servers_one_dies_and_comes_back():
    async def main(servers: list[Server]) -> None:
        llm = ServerLLM([server.base_url for server in servers], "m", concurrency=4)
        assert (llm.slots.limit, llm.slots.free, llm.name) == (12, 12, "m")
        seen: dict[str, list[str]] = defaultdict(list)

        async def kill(server: Server) -> None:
            await until(lambda: sum(map(len, seen.values())) >= 40)
            server.stop()

        def replied(question: str, port: str) -> None:
            seen[question].append(port)

        async with aclosing(llm):
            dead, *others = servers
            await asyncio.gather(kill(dead), *(ask(llm, f"a{i}", 10, replied) for i in range(12)))
            for ports in seen.values():
                assert len(ports) == 10
                stayed, moved = len(set(ports)) == 1, len(set(ports)) == 2 and ports[0] == str(dead.port)
                assert (stayed and ports[0] != str(dead.port)) or (moved and ports[-1] != str(dead.port))
            for port in (str(server.port) for server in servers):
                assert 3 <= sum(ports[0] == port for ports in seen.values()) <= 5, "shared evenly"
            assert {ports[-1] for ports in seen.values()} == {str(server.port) for server in others}
            dead.start()
            await asyncio.sleep(2.0)  # until the next probe is due
            await ask(llm, "probe", 1, replied)
            await asyncio.gather(*(ask(llm, f"b{i}", 5, replied) for i in range(12)))
            assert sum(seen[f"b{i}"][-1] == str(dead.port) for i in range(12)) >= 3

    with ExitStack() as stack:
        asyncio.run(main([stack.enter_context(Server()) for _ in range(3)]))


def test_of_two_servers_one_fails_every_request():
    async def main(servers: list[Server]) -> set[str]:
        llm, replies = ServerLLM([server.base_url for server in servers], "m", max_retries=1, backoff_s=0.01), set()
        async with aclosing(llm):
            await asyncio.gather(*(ask(llm, str(i), 3, lambda _, text: replies.add(text)) for i in range(20)))
        return replies

    with Server() as broken, Server() as server:
        broken.script = always(Answer(500, "CUDA error: an illegal memory access was encountered"))
        assert asyncio.run(main([broken, server])) == {str(server.port)}


def test_the_check_asks_every_address():
    async def main(servers: list[Server]) -> None:
        llm = ServerLLM([server.base_url for server in servers], "m")
        await llm.check()
        servers[1].stop()
        with pytest.raises(LLMError, match=str(servers[1].port)):
            await llm.check()
        await llm.aclose()

    with ExitStack() as stack:
        asyncio.run(main([stack.enter_context(Server()) for _ in range(2)]))
