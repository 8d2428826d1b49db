from __future__ import annotations

import asyncio

import pytest

from reasonrag.llm.base import Caller, caller
from reasonrag.llm.slots import Slots
from tests.virtual_time import run_virtually


async def hold(slots: Slots, seconds: float, priority: int = 0, log: list[int] | None = None) -> None:
    caller.set(Caller("", priority))
    async with slots.request():
        if log is not None:
            log.append(priority)
        await asyncio.sleep(seconds)


def test_the_most_urgent_request_goes_first_and_equal_ones_in_their_order():
    async def main():
        slots, log = Slots(1), []
        async with asyncio.TaskGroup() as group:
            for priority in (0, 5, 3, 4, 3):
                group.create_task(hold(slots, 1.0, priority, log))
            await asyncio.sleep(0.5)
            assert (slots.in_flight, slots.waiting, slots.free) == (1, 4, -4)
        assert (slots.in_flight, slots.waiting, slots.free) == (0, 0, 1)
        return log

    assert run_virtually(main()) == [0, 3, 3, 4, 5]


@pytest.mark.parametrize("cancelled_at", [0.5, 1.0], ids=["while it waits", "as it gets its slot"])
def test_a_cancelled_request_leaves_no_slot_behind(cancelled_at):
    async def main():
        slots = Slots(1)
        first, second, third = (asyncio.create_task(hold(slots, 1.0)) for _ in range(3))
        asyncio.get_running_loop().call_at(cancelled_at, second.cancel)
        await first
        second.cancel()
        await third
        assert second.cancelled() or second.done()
        assert (slots.in_flight, slots.waiting) == (0, 0)

    run_virtually(main())
