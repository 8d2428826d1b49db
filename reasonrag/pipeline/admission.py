"""Admission: begin the next question, or the next attempt, as soon as every engine has room for its requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from reasonrag.core.slots import SlotCounts
from reasonrag.core.watch import STALL_S, progressing
from reasonrag.rollout import gather_all

T = TypeVar("T")

# Three times as many requests wait at an engine as are in flight. With fewer, the trees that begin last have no time to
# catch up, and the slots empty at the end: 1,000 questions kept 256 slots busy for .93 of the time with as many, .95
# with twice as many, .99 with three times as many (benchmarks/utilisation.py). With more, more trees would be in
# memory, and their prefixes in the engine's cache.
_QUEUE = 3.0
_ITEMS_PER_SLOT = 3  # those that search, or wait for the other engine, hold no slot
_TURNS = 6  # of the event loop, until a new item has asked for its first slots
_POLL_S = 0.005


async def work_through(
    items: Iterable[T],
    work: Callable[[T], Coroutine[Any, Any, None]],
    engines: Sequence[SlotCounts],
    *,
    stall_s: float = STALL_S,
) -> None:
    """Work on all items, and begin each as soon as every engine has room for it.

    How many that are follows from what they do: a tree has few requests in flight at its root and more below.

    Args:
        items: the next one is taken when it begins, so that a generator can end the work.
        work: may wait for anything, and for slots of `engines` above all.
        engines: of the models that `work` calls; their limits may change on the way.
        stall_s: how long nothing at all may get on.

    Raises:
        Stalled: nothing did; what has begun is cancelled.
        Exception: the first one of `work`, once all that has begun has ended. Nothing begins after it.
    """
    working: set[asyncio.Task[None]] = set()
    failed: list[Awaitable[None]] = []

    def end(task: asyncio.Task[None]) -> None:
        working.discard(task)
        if task.cancelled() or task.exception() is not None:
            failed.append(task)

    try:
        async with _rare_collections(), progressing(stall_s):
            for item in items:
                task = asyncio.create_task(work(item))
                working.add(task)
                task.add_done_callback(end)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                while not _has_room(len(working), engines):  # noqa: ASYNC110 -- several engines, with limits that move
                    await asyncio.sleep(_POLL_S)
                if failed:
                    break
            await gather_all([*failed, *working])
    finally:
        for task in working:
            task.cancel()


@contextlib.asynccontextmanager
async def _rare_collections() -> AsyncIterator[None]:
    """Look for cyclic garbage after 100,000 new objects instead of 700: steps and trees are none, and walking through
    them would be a sixth of our CPU, or a twentieth after 10,000.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, 100_000) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def _has_room(working: int, engines: Sequence[SlotCounts]) -> bool:
    most = _ITEMS_PER_SLOT * max(slots.limit for slots in engines)
    return working < most and all(slots.free > -_QUEUE * slots.limit for slots in engines)
