"""`Slots`: the requests in flight at one engine, the most urgent first."""

from __future__ import annotations

import asyncio
import heapq
from types import TracebackType

from reasonrag.llm.base import caller


class Slots:
    """A bounded number of requests at an engine; the others wait, ordered by `Caller.priority` and arrival.

    Time is the running loop's. It works in one event loop after another.

    Attributes:
        limit: requests that may be in flight.
        in_flight: requests that hold a slot.
        waiting: requests that wait for one.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or 64
        self.in_flight = 0
        self.waiting = 0
        self._arrivals = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def free(self) -> int:
        """Slots that nobody holds or waits for; negative while more requests wait than slots are free."""
        return self.limit - self.in_flight - self.waiting

    def request(self) -> Request:
        """Return a context manager that holds a slot: `async with slots.request() as request`."""
        return Request(self)

    async def acquire(self) -> None:
        """Wait for a slot and take it."""
        if self.in_flight < self.limit:
            self.in_flight += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._queue, (caller.get().priority, self._arrivals, turn))
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.waiting -= 1
            else:  # it was given a slot in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back, to the most urgent request that waits."""
        self.in_flight -= 1
        while self._queue and self.in_flight < self.limit:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self.waiting -= 1
                self.in_flight += 1


class Request:
    """A request that holds a slot while the `async with` block runs."""

    __slots__ = ("_slots",)

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    async def __aenter__(self) -> Request:
        await self._slots.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.release()

    def refuse(self) -> None:
        """Note that the engine refused the request for now: 429, 5xx or a timeout."""
