"""`Slots`: the requests in flight at one engine, the most urgent first, and how many there should be."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from reasonrag.core.event_loop import beat
from reasonrag.core.http import AWAY, Unavailable, backoff

START, LARGEST = 64, 1024
"""Initial and maximum concurrency when the server reports no limit."""

_FIRST_PROBE_S, _LONGEST_PROBE_S = 0.1, 2.0
_EARLY_S = 1e-3  # a timer may fire this much before its time: uvloop counts whole milliseconds

_STEP, _SHRINK = 64, 0.75  # additive increase and multiplicative decrease of the limit, once a round
_SLOW = 2.0  # times the seconds a token of the fastest round: then the engine has more requests than it works on
_SURE, _CROWDED = 5, 3  # refusals of a request that close a slot: .4**5 is .01; and if three of four requests wait
_MOST = 7 / 8  # share of the requests in flight that have to be at the engine for closed slots to be opened
_FULL = 0.8  # share of a round's replies that have to find all slots in use: else they do not measure the limit


answered: ContextVar[list[Request] | None] = ContextVar("answered", default=None)
"""Collects the requests of a task that were answered and keep their slots until the list's owner calls `leave`."""


class Slots:
    """A bounded number of requests at one engine; the others wait, ordered by priority and arrival.

    While the engine is away, one request at a time finds out whether it is back, and the others wait. It is away once
    it has lost three requests in a row, or announces when it is back. Time is the running loop's. One event loop after
    another may use it.

    A request that is refused (429, or 503 of an engine that works on an earlier one) keeps its slot until it enters
    again, or is released. An engine that refuses by chance takes it soon; one that is full does not, so each fifth
    refusal of a request closes a slot, and each third while three of four wait like that. Every other reply opens one
    again while at most one of eight does.

    Attributes:
        in_flight: requests that hold a slot.
        waiting: requests that wait for one.
        away_since: the loop's time at which the engine went away; None while it answers.
        losses: requests that the engine has lost since it answered one.
        probe_at: the loop's time at which an engine that is away is asked next.
        given_up: whether every request is sent at once, as the engine has been away for too long.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Allow `limit` requests. With None, increase the limit while replies stay fast, else decrease it (AIMD)."""
        self.in_flight = 0
        self.waiting = 0
        self.away_since: float | None = None
        self._is_fixed = limit is not None
        self._most: float = limit or START
        self._fastest = math.inf  # seconds a token, of all rounds
        self._begin_round()
        self._queue: list[tuple[int, int, int, Request, asyncio.Future[None]]] = []
        self._arrivals = 0
        self.drained_by: Exception | None = None
        self.retrying: set[asyncio.Timeout] = set()  # around requests that failed and wait until they are sent again
        self.losses = 0
        self._sent: dict[Request, None] = {}  # requests at the engine, in their order
        self._open = math.inf  # slots that are not closed
        self._probing = False  # whether a request is at an engine that was away when it was sent
        self._probes = 0
        self.probe_at = 0.0
        self.given_up = False

    @property
    def limit(self) -> int:
        """Requests that may be in flight, at least 1; setting it fixes the most."""
        return int(min(self._most, self._open))

    @limit.setter
    def limit(self, limit: int) -> None:
        self._is_fixed, self._most = True, limit

    @property
    def free(self) -> int:
        """Free slots less waiting requests: none are free while the engine is away."""
        return (self.limit - self.in_flight if self.away_since is None else 0) - self.waiting

    def may_probe(self) -> bool:
        """Return whether the next request would be the one that finds out if the engine is back."""
        return self.away_since is not None and not self.waiting and self._is_due(asyncio.get_running_loop().time())

    def request(self, priority: int = 0) -> Request:
        """Return a context manager that holds a slot while its block runs. The lowest `priority` waits least."""
        return Request(self, priority)

    def drain(self, error: Exception | None) -> None:
        """Let the requests that were sent end; raise `error` in the others, and in later ones. None ends that."""
        self.drained_by = error
        if error is not None:
            self.turn_away(error)
        while self.retrying:  # each once: `drain` may be called again
            self.retrying.pop().reschedule(0.0)

    def turn_away(self, error: Exception) -> None:
        """Raise `error` in every request that waits."""
        queue, self._queue = self._queue, []
        for *_, turn in queue:
            if not turn.done():
                turn.set_exception(error)
                self.waiting -= 1

    def give_up(self) -> None:
        """Let every request try, each once: the engine has been away for too long."""
        self.given_up = True
        self._admit()

    async def enter(self, request: Request) -> None:
        """Wait for a slot and take it, unless the request has kept its slot."""
        if self.drained_by is not None:
            raise self.drained_by
        loop = asyncio.get_running_loop()
        if request.keeps:
            request.keeps = False
        elif self._has_room(loop.time()):
            self._take(request, loop.time())
        else:
            await self._wait(request, loop)
        self._sent[request] = None  # not before: the order is that in which they are sent

    async def _wait(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        turn = loop.create_future()
        self._arrivals += 1
        # A request that has failed goes last: it may be the one that kills the engine.
        heapq.heappush(self._queue, (request.failures, request.priority, self._arrivals, request, turn))
        self.waiting += 1
        if self.away_since is not None:  # the timer of the last failure may have ended with its event loop
            loop.call_at(self.probe_at, self._admit)
        try:
            await turn
        except asyncio.CancelledError as error:
            if turn.cancelled():
                self.waiting -= 1
            elif turn.exception() is None:  # it was given a slot in the same moment
                self.leave(request, error)
            raise

    def leave(self, request: Request, error: BaseException | None) -> None:
        """Give the slot of a request back that was answered, or that ended with `error`, unless it was refused."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        answers = not isinstance(error, asyncio.CancelledError)  # else its task has gone
        if isinstance(error, Unavailable):
            self._judge(request, error)
            answers = error.cause != "timeout"
        self._sent.pop(request, None)
        if request.keeps:
            return
        was_full = self.in_flight >= self.limit
        self.in_flight -= 1
        if request.probes:
            self._probing = False
        if error is None:
            self.losses = 0
            if len(self._sent) >= _MOST * self.in_flight:
                self._open += 0.5
            beat()
        if isinstance(error, Unavailable) and error.away:
            self._lose(now, request, error)
            loop.call_at(max(self.probe_at, now), self._admit)
        elif self.away_since is not None and answers:
            self.away_since, self._probing, self.given_up, self._open = None, False, False, math.inf
            self._begin_round()
        elif error is None and not self._is_fixed:
            self._replied(now - request.started, request.tokens, was_full)
        if self._queue:
            self._admit()

    def _begin_round(self) -> None:
        self._replies = self._full = self._tokens = 0
        self._seconds = 0.0

    def _replied(self, seconds: float, tokens: int, was_full: bool) -> None:
        """Count a reply; after a round of as many as there are slots, change their number (AIMD)."""
        self._replies += 1
        self._full += was_full
        self._seconds += seconds
        self._tokens += tokens
        if self._replies < max(self.limit, START):
            return
        pace = self._seconds / max(self._tokens, 1)
        if self._full >= _FULL * self._replies:
            self._fastest = min(self._fastest, pace)
            more = self._most + _STEP if pace <= _SLOW * self._fastest else self._most * _SHRINK
            self._most = min(max(more, START), LARGEST)
        self._begin_round()

    def release(self, request: Request) -> None:
        """Give the slot back that a refused request has kept, as it is not sent again."""
        if request.keeps:
            request.keeps = False
            self.leave(request, asyncio.CancelledError())

    def _judge(self, request: Request, failure: Unavailable) -> None:
        """Compare a failure with the other requests: the engine is full, away, or neither."""
        refuses, late = failure.status in (429, 503), failure.cause == "timeout"
        works = self.away_since is None and next(iter(self._sent), request) is not request
        self._sent.pop(request, None)
        if refuses or late:
            request.refusals += 1
            if late or request.refusals % (_SURE if 4 * len(self._sent) >= self.in_flight else _CROWDED) == 0:
                self._open = max(self.limit - 1, len(self._sent), 1)
        if failure.status == 429 or (refuses and works):
            request.keeps, failure.counts = True, False
        elif failure.status in AWAY or (late and request.probes):
            failure.away = True
        if failure.away and request.probes:  # the engine has not been there
            failure.counts = False

    def _lose(self, now: float, request: Request, failure: Unavailable) -> None:
        request.failures += 1
        self.losses += 1
        if self.away_since is None and failure.retry_after_s is None and self.losses < 3:
            return  # it may have lost this request alone
        if self.away_since is None:
            self.away_since, self._probes = now, 0
        elif not request.probes:
            return  # it was in flight when the engine went away
        self._probes += 1
        wait_s = backoff(self._probes, _FIRST_PROBE_S, _LONGEST_PROBE_S)
        self.probe_at = now + max(wait_s, failure.retry_after_s or 0.0)

    def _is_due(self, now: float) -> bool:
        return not self._probing and now + _EARLY_S >= self.probe_at

    def _has_room(self, now: float) -> bool:
        if self.away_since is not None and not self.given_up:
            return self._is_due(now)
        return self.in_flight < self.limit

    def _take(self, request: Request, now: float) -> None:
        self.in_flight += 1
        self._probing = request.probes = self.away_since is not None
        request.started = now

    def _admit(self) -> None:
        """Give the free slots to the most urgent requests that wait."""
        now = asyncio.get_running_loop().time()
        while self._queue and self._has_room(now):
            *_, request, turn = heapq.heappop(self._queue)
            if not turn.done():  # else its task was cancelled
                self.waiting -= 1
                self._take(request, now)
                turn.set_result(None)


@dataclass(eq=False, slots=True)
class Request:
    """One request. It holds a slot in `async with request:`, and waits for one before.

    Attributes:
        slots: the slots of its server, for one of which it waits.
        priority: of two that wait, the one with the lower number is first.
        tokens: weight of the reply in measurements of throughput.
        probes: whether the engine was away when the request got its slot.
        failures: how often the engine lost it, or was away.
        started: the loop's time at which the request got its slot.
        refusals: how often the engine refused it.
        keeps: whether it was refused, and has its slot until it is sent again.
    """

    slots: Slots
    priority: int = 0
    tokens: int = 1
    probes: bool = False
    failures: int = 0
    started: float = 0.0
    refusals: int = 0
    keeps: bool = False

    async def __aenter__(self) -> Request:
        await self.slots.enter(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        kept = answered.get()
        if error is None and kept is not None:
            kept.append(self)
        else:
            self.slots.leave(self, error)


def _total(name: str) -> property:
    return property(lambda all_slots: sum(getattr(slots, name) for slots in all_slots._engines))


class AllSlots:
    """The slots of several engines, seen as one."""

    def __init__(self, engines: Sequence[Slots]) -> None:
        self._engines = engines

    limit, in_flight, waiting, free = map(_total, ("limit", "in_flight", "waiting", "free"))

    def drain(self, error: Exception | None) -> None:
        for slots in self._engines:
            slots.drain(error)


SlotCounts = Slots | AllSlots
