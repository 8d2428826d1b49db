from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from reasonrag.core.errors import Stalled
from reasonrag.core.event_loop import Worker, beat, progressing


def test_a_worker_calls_one_function_after_another_and_returns_or_raises_what_it_does():
    async def main() -> None:
        worker, calls = Worker("counter"), list[int]()
        await asyncio.gather(*(worker.call(calls.append, number) for number in range(20)))
        assert calls == list(range(20))
        with pytest.raises(ZeroDivisionError):
            await worker.call(divmod, 1, 0)
        await worker.aclose()

    asyncio.run(main())


def run(work: Callable[[], object], stall_s: float) -> None:
    async def main() -> None:
        async with progressing(stall_s):
            await Worker("the model").call(work)

    asyncio.run(main())


def test_a_hang_ends_and_is_named_by_its_stack(capfd):
    forever = threading.Event()
    with pytest.raises(
        Stalled, match=r"stands still: no token, reply or commit for 0\.2 s; 1 tasks at event_loop\.py:\d+ call"
    ):
        run(forever.wait, 0.2)
    forever.set()
    assert "in wait" in capfd.readouterr().err


def test_who_gets_on_is_left_alone_and_another_timeout_stays_one():
    quiet = threading.Event()

    def work() -> None:
        for _ in range(20):
            beat()
            quiet.wait(0.05)

    run(work, 0.4)

    async def other() -> None:
        async with progressing(60):
            await asyncio.wait_for(asyncio.sleep(60), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(other())
