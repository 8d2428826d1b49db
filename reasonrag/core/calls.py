"""Calls of models and retrievers: how many are in flight at each server, which server gets each, and HTTP itself.

`Slots` limits the requests at one engine, the most urgent first; `Addresses` sends each request to one of
several equal servers until it is answered; `exchange` is one request over HTTP, with its limits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, InitVar, dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import structlog

from reasonrag.core.errors import BackendError, ConfigError, check_limits
from reasonrag.core.event_loop import beat
from reasonrag.core.text import MOST_QUOTED, redact

if TYPE_CHECKING:
    import aiohttp

log = structlog.get_logger()

T = TypeVar("T")

TOKEN_ENV = "REASONRAG_TOKEN"
"""Environment variable with the token that a retrieval server asks for, or the proxy in front of it."""

AWAY = frozenset({502, 503, 504})
"""Statuses of a proxy while its server restarts; a full server may send 503, too."""

RETRIES: Counter[str] = Counter()
"""Retries of this process by cause, for its progress line."""

START, LARGEST = 64, 1024
"""Initial and maximum concurrency when the server reports no limit."""

_STEP, _SHRINK = 64, 0.75  # additive increase and multiplicative decrease of the limit, once a round
_SLOW = 2.0  # times the seconds a token of the fastest round: then the engine has more requests than it works on
_SURE, _CROWDED = 5, 3  # refusals of a request that close a slot: .4**5 is .01; and if three of four requests wait
_MOST = 7 / 8  # share of the requests in flight that have to be at the engine for closed slots to be opened
_FULL = 0.8  # share of a round's replies that have to find all slots in use: else they do not measure the limit

_LOSSES = 3  # in a row, after which an engine is away
_FIRST_PROBE_S, _LONGEST_PROBE_S = 0.1, 2.0
_EARLY_S = 1e-3  # a timer may fire this much before its time: uvloop counts whole milliseconds
_LONGEST_WAIT_S = 30.0  # before a retry at a server that is there
_POLL_S = 0.5  # between looks for a drain during such a wait
_CONNECT_TIMEOUT_S = 10.0
_STOPPED_S = 2.0  # that a timer is late if this process was stopped
_jitter = random.Random()  # not the global generator: a retry must not shift the draws of a seeded run

answered: ContextVar[list[Request] | None] = ContextVar("answered", default=None)
"""Collects the requests of a task that were answered and keep their slots until the list's owner calls `leave`."""


@dataclass(eq=False)
class Unavailable(Exception):
    """A transient failure; a retry may succeed.

    Attributes:
        cause: short name under which the failure is counted; `timeout` without a reply in time.
        status: HTTP status of the reply, 0 without one.
        retry_after_s: seconds that the server asked to wait, or None without such a header.
        away: whether the server is not there, or does not serve
            at present: it is waited for, whatever the deadline.
        counts: whether this failure uses up one of `max_retries`. One of a server that is away does if
            the request had come there, as the server may have died of it.
    """

    message: str
    _: KW_ONLY
    cause: str = "unreachable"
    status: int = 0
    retry_after_s: float | None = None
    away: bool = False
    counts: bool = True


def backoff(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after `failures` failed attempts: doubling, at most `longest_s`, with jitter."""
    doublings = min(failures - 1, 30)  # 2.0**1024 would overflow
    return min(first_s * 2.0**doublings, longest_s) * _jitter.uniform(0.5, 1.0)


class Slots:
    """A bounded number of requests at one engine; the others wait, ordered by priority and arrival.

    While the engine is away, one request at a time finds out
    whether it is back, and the others wait. It is away once it has
    lost three requests in a row, or announces when it is back. Time
    is the running loop's. One event loop after another may use it.

    A request that is refused (429, or 503 of an engine that works on an earlier
    one) keeps its slot until it enters again, or is released. An engine that
    refuses by chance takes it soon; one that is full does not, so each fifth
    refusal of a request closes a slot, and each third while three of four wait
    like that. Every other reply opens one again while at most one of eight does.

    Attributes:
        url: address of the engine; "" in this process.
        in_flight: requests that hold a slot.
        waiting: requests that wait for one.
        away_since: the loop's time at which the engine went away; None while it answers.
        probe_at: the loop's time at which an engine that is away is asked next.
        losses: requests that the engine has lost since it answered one.
        given_up: whether every request is sent at once, as the engine has been away for too long.
        returns: how often the engine came back after an outage, perhaps after a restart.
        meanwhile: what requests do during an outage, for a message.
    """

    def __init__(self, limit: int | None = None, url: str = "") -> None:
        """Allow `limit` requests. With None, increase the limit while replies stay fast, else decrease it (AIMD)."""
        self.url = url
        self.meanwhile = "wait"
        self.in_flight = self.waiting = self.losses = self.returns = 0
        self._is_fixed, self._most = limit is not None, float(limit or START)
        self._open = self._fastest = math.inf  # slots that are not closed; seconds a token of the fastest round
        self._begin_round()
        self._queue: list[tuple[int, int, int, Request, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._sent: dict[Request, None] = {}  # requests at the engine, in their order
        self.drained_by: Exception | None = None
        self.away_since: float | None = None
        self.probe_at = 0.0
        self.given_up = False

    @property
    def limit(self) -> int:
        """Requests that may be in flight, at least 1; setting it fixes the most."""
        return int(min(self._most, self._open))

    @limit.setter
    def limit(self, limit: int) -> None:
        self._is_fixed, self._most = True, float(limit)

    @property
    def free(self) -> int:
        """Free slots less waiting requests: none are free while the engine is away."""
        return (self.limit - self.in_flight if self.away_since is None else 0) - self.waiting

    def request(self, priority: int = 0) -> Request:
        """Return a context manager that holds a slot while its block runs. The lowest `priority` waits least."""
        return Request(self, priority)

    def drain(self, error: Exception | None) -> None:
        """Let the requests that were sent end; raise `error` in the others, and in later ones. None ends that."""
        self.drained_by = error
        if error is not None:
            self.turn_away(error)

    def turn_away(self, error: Exception) -> None:
        """Raise `error` in every request that waits."""
        waiting_requests, self._queue = self._queue, []
        for *_, admission in waiting_requests:
            if not admission.done():
                admission.set_exception(error)
                self.waiting -= 1

    async def enter(self, request: Request) -> None:
        """Wait for a slot and take it, unless the request has kept its slot."""
        if self.drained_by is not None:
            raise self.drained_by
        if request.keeps:
            request.keeps, self._sent[request] = False, None
            return
        running_loop = asyncio.get_running_loop()
        admission = running_loop.create_future()
        # A request that has failed goes last: it may be the one that kills the engine.
        heapq.heappush(self._queue, (request.failures, request.priority, next(self._arrivals), request, admission))
        self.waiting += 1
        self.admit()
        if self.away_since is not None:  # the timer of the last failure may have ended with its event loop
            running_loop.call_at(self.probe_at, self.admit)
        try:
            await admission
        except asyncio.CancelledError as error:
            if admission.cancelled():
                self.waiting -= 1
            elif admission.exception() is None:  # it was given a slot in the same moment
                self.leave(request, error)
            raise

    async def pause(self, seconds: float) -> None:
        """Wait before a request is sent again, until a drain at the longest."""
        running_loop = asyncio.get_running_loop()
        ends_at = running_loop.time() + seconds
        while self.drained_by is None and (left_s := ends_at - running_loop.time()) > 0:  # noqa: ASYNC110 -- loops change
            await asyncio.sleep(min(left_s, _POLL_S))

    def leave(self, request: Request, error: BaseException | None) -> None:
        """Give the slot of a request back that was answered, or that ended with `error`, unless it was refused."""
        running_loop = asyncio.get_running_loop()
        failure = error if isinstance(error, Unavailable) else None
        is_answer = not isinstance(error, asyncio.CancelledError) and (failure is None or failure.cause != "timeout")
        if failure is not None:
            self._judge(request, failure)
        self._sent.pop(request, None)
        if request.keeps:
            return
        # Only replies that find all slots in use measure whether the limit is too low.
        was_full = self.in_flight >= self.limit
        self.in_flight -= 1
        if failure is not None and failure.away:
            self._lose(request, failure, running_loop.time())
            running_loop.call_at(max(self.probe_at, running_loop.time()), self.admit)
        elif self.away_since is not None and is_answer:
            log.warning("a server answers again", url=_host(self.url))
            self.away_since, self.given_up, self._open = None, False, math.inf
            self.returns += 1
            self._begin_round()
        if error is None:
            self.losses = 0
            # Few requests wait after a refusal, so a slot that was
            # closed may be opened again, at every other reply.
            if len(self._sent) >= _MOST * self.in_flight:
                self._open += 0.5
            self._count(running_loop.time() - request.started, request.tokens, was_full)
            beat()
        self.admit()

    def release(self, request: Request) -> None:
        """Give the slot back that a refused request has kept, as it is not sent again."""
        if request.keeps:
            request.keeps = False
            self.leave(request, asyncio.CancelledError())

    def _begin_round(self) -> None:
        self._replies = self._full = self._tokens = 0
        self._seconds = 0.0

    def _count(self, seconds: float, tokens: int, was_full: bool) -> None:
        """Count a reply; after a round of as many as there are slots, change their number (AIMD)."""
        self._replies += 1
        self._full += was_full
        self._seconds += seconds
        self._tokens += tokens
        if self._is_fixed or self._replies < max(self.limit, START):
            return
        # Seconds a token, not a reply: answers are longer
        # than queries, and a round may have more of either.
        token_seconds = self._seconds / max(self._tokens, 1)
        if self._full >= _FULL * self._replies:
            self._fastest = min(self._fastest, token_seconds)
            next_limit = self._most + _STEP if token_seconds <= _SLOW * self._fastest else self._most * _SHRINK
            self._most = min(max(next_limit, START), LARGEST)
        self._begin_round()

    def _judge(self, request: Request, failure: Unavailable) -> None:
        """Compare a failure with the other requests: the engine is full, away, or neither."""
        refuses, is_late = failure.status in (429, 503), failure.cause == "timeout"
        # Requests stand in the order in which they were sent: an earlier one is what the engine works on.
        is_working = self.away_since is None and next(iter(self._sent), request) is not request
        self._sent.pop(request, None)
        if refuses or is_late:
            request.refusals += 1
            # A refusal by chance rarely comes so often in a row; a full engine refuses every time.
            is_crowded = 4 * len(self._sent) < self.in_flight
            if is_late or request.refusals % (_CROWDED if is_crowded else _SURE) == 0:
                self._open = max(self.limit - 1, len(self._sent), 1)
        if failure.status == 429 or (refuses and is_working):
            request.keeps, failure.counts = True, False
            if failure.status == 429:  # the engine is there
                self.away_since, self.given_up = None, False
        elif failure.status in AWAY or (is_late and self._is_probe(request)):
            failure.away = True
        if failure.away and self._is_probe(request):  # the engine has not been there
            failure.counts = False

    def _lose(self, request: Request, failure: Unavailable, current_time: float) -> None:
        request.failures += 1
        self.losses += 1
        if self.away_since is None:
            if failure.retry_after_s is None and self.losses < _LOSSES:
                return  # it may have lost this request alone
            self.away_since = current_time
            log.warning(f"a server does not answer; its requests {self.meanwhile}", url=_host(self.url))
        wait_s = backoff(self.losses - _LOSSES + 1, _FIRST_PROBE_S, _LONGEST_PROBE_S)
        self.probe_at = max(self.probe_at, current_time + max(wait_s, failure.retry_after_s or 0.0))

    def _is_probe(self, request: Request) -> bool:
        """Return whether a request was sent to find out if an engine that is away is back."""
        return self.away_since is not None and request.started > self.away_since

    def has_room(self) -> bool:
        """Return whether a request could be sent now; to an engine that is away, one that finds out if it is back."""
        if self.away_since is None or self.given_up:
            return self.in_flight < self.limit
        is_due = asyncio.get_running_loop().time() + _EARLY_S >= self.probe_at
        return is_due and not any(map(self._is_probe, self._sent))

    def admit(self) -> None:
        """Give the free slots to the most urgent requests that wait."""
        while self._queue and self.has_room():
            *_, request, admission = heapq.heappop(self._queue)
            if not admission.done():  # else its task was cancelled
                self.waiting -= 1
                self.in_flight += 1
                self._sent[request] = None
                request.started = asyncio.get_running_loop().time()
                admission.set_result(None)


@dataclass(eq=False, slots=True)
class Request:
    """One request. It holds a slot in `async with request:`, and waits for one before.

    Attributes:
        slots: the slots of its server, for one of which it waits.
        priority: of two that wait, the one with the lower number is first.
        tokens: weight of the reply in measurements of throughput.
        failures: how often the engine lost it, or was away.
        started: the loop's time at which the request got its slot.
        refusals: how often the engine refused it.
        keeps: whether it was refused, and has its slot until it is sent again.
    """

    slots: Slots
    priority: int = 0
    tokens: int = 1
    failures: int = 0
    started: float = 0.0
    refusals: int = 0
    keeps: bool = False

    async def __aenter__(self) -> Request:
        await self.slots.enter(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        answered_requests = answered.get()
        if error is None and answered_requests is not None:
            answered_requests.append(self)
        else:
            self.slots.leave(self, error)


class AllSlots:
    """The slots of several engines, seen as one."""

    def __init__(self, engines: Sequence[Slots]) -> None:
        self._engines = engines

    def __getattr__(self, count: str) -> int:
        return sum(getattr(slots, count) for slots in self._engines)

    def drain(self, error: Exception | None) -> None:
        for slots in self._engines:
            slots.drain(error)


SlotCounts = Slots | AllSlots


@dataclass(eq=False)
class Addresses:
    """Chooses the server of each request, sends it until it is answered, and waits for servers that are away.

    Args:
        urls: addresses of servers that all answer the same.
        concurrency: requests in flight at each of them; None finds out (`Slots`).
        name: of the model or retriever, for messages.
        error: raised if a request is given up.
        deadline_s: seconds for a request with its retries at
            servers that are there, without waits for a slot.
        max_retries: further attempts after a failure there, without refusals (429, or 503 of a server
            that works on other requests).
        patience_s: seconds to wait while none of them answers. An outage uses them up once: each request
            that is left, or comes later, is sent, and fails if it meets no server.
        first_wait_s: wait before the first retry. It doubles
            with every further one, to 30 s, with jitter.

    Attributes:
        all: the servers, each with its slots.
        slots: those of all servers.
    """

    urls: InitVar[Sequence[str]]
    concurrency: InitVar[int | None]
    name: str
    error: type[BackendError]
    deadline_s: float
    max_retries: int
    patience_s: float
    first_wait_s: float = 0.125

    def __post_init__(self, urls: Sequence[str], concurrency: int | None) -> None:
        self.all = [Slots(concurrency, url) for url in urls]
        for slots in self.all:
            slots.meanwhile = "go to others" if self.all[1:] else f"wait up to {self.patience_s:g} s for it"
        self.slots: SlotCounts = self.all[0] if len(self.all) == 1 else AllSlots(self.all)
        self._homes: dict[str, Slots] = {}  # of questions

    async def ask(
        self, send: Callable[[Request, str, float], Awaitable[T]], *, priority: int = 0, question: str = ""
    ) -> T:
        """Send a request until it is answered, refused for good or given up (`error`).

        Args:
            send: sends it once, given its slot, an address and the seconds left. It raises `Unavailable`
                if another attempt may succeed, and any other error if it cannot.
            priority: of two that wait, the one with the lower number is first.
            question: its requests stay at one server while that answers.
        """
        running_loop, request = asyncio.get_running_loop(), Request(self.all[0], priority)
        left_s, ends_at, counted, retries = self.deadline_s, math.inf, 0, 0
        attempts = 0
        try:
            while True:
                if not request.keeps:
                    request.slots = self._choose(question, request.slots if attempts else None)
                try:
                    async with request:
                        ends_at = running_loop.time() + left_s  # the wait for a slot does not count
                        return await send(request, request.slots.url, left_s)
                except Unavailable as failure:
                    attempts += 1
                    counted += failure.counts
                    # A server that is away is waited for in its queue, and the deadline begins again.
                    if failure.away:
                        self._lost(request.slots, failure)
                        wait_s, retries, left_s = 0.0, 0, self.deadline_s
                    else:
                        retries += 1
                        wait_s = backoff(retries, self.first_wait_s, _LONGEST_WAIT_S) + (failure.retry_after_s or 0.0)
                        left_s = ends_at - running_loop.time() - wait_s
                    if counted > self.max_retries or left_s <= 0:
                        message = f"{self.name} gave no answer in {attempts} attempts; last: {failure}"
                        raise self.error(message, cause=failure.cause) from failure
                    RETRIES[failure.cause] += 1
                if wait_s:
                    await request.slots.pause(wait_s)
        finally:
            request.slots.release(request)

    def _choose(self, question: str, failed: Slots | None) -> Slots:
        """Return the server of a question's next request: its last one, or else the one with the most free slots.

        A request that has just `failed` at one goes to another that answers.
        """
        if len(self.all) == 1:
            return self.all[0]
        home = self._homes.get(question)
        answering = [server for server in self.all if server.away_since is None]
        others = [server for server in answering if server is not failed]
        if home is None or home not in others:
            # A request now and then finds out whether a server is back.
            away = [server for server in self.all if server.away_since is not None]
            due = [server for server in away if not server.waiting and server.has_room()]
            home = due[0] if due else min(others or answering or self.all, key=_load)
            self.all.remove(home)  # equal ones take turns: `min` takes the first
            self.all.append(home)
        if question:
            self._homes[question] = home
        return home

    def _lost(self, server: Slots, failure: Unavailable) -> None:
        """Note that a server lost a request. If it is away, what waits there goes elsewhere, or patience may end."""
        if server.away_since is None:  # it lost this request alone
            return
        away_since = [other.away_since for other in self.all if other.away_since is not None]
        # Another one answers: requests that wait here choose again.
        if len(away_since) < len(self.all):
            server.given_up = False
            server.turn_away(Unavailable(str(failure), cause=failure.cause, away=True, counts=False))
            return
        current_time = asyncio.get_running_loop().time()
        silent_s = current_time - max(away_since)
        due = min(other.probe_at for other in self.all)  # a Retry-After header sets it too
        if silent_s + due - current_time < self.patience_s and not server.given_up:
            return
        for other in self.all:  # not failed without an attempt, as the servers may be back
            other.given_up = True
            other.admit()
        message = f"{self.name} has not answered for {silent_s:.0f} s; last: {failure}"
        raise self.error(message, cause=failure.cause) from failure


def _load(server: Slots) -> float:
    # Of several that answer, one that fails some requests gets fewer.
    return (server.in_flight + server.waiting + server.losses) / server.limit


def is_transient(status: int) -> bool:
    """Return whether a request with this HTTP status may succeed if it is sent again.

    >>> [is_transient(status) for status in (404, 429, 503, 501)]
    [False, True, True, False]
    """
    # 501 and 505: the server will never support the request.
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds in a `Retry-After` header (RFC 9110, sec. 10.2.3: a number or a date), or None.

    >>> parse_retry_after("2"), parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), parse_retry_after("soon")
    (2.0, 0.0, None)
    """
    try:
        seconds = float(header or "")
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


async def exchange(
    session: aiohttp.ClientSession, method: str, url: str, timeout_s: float, most_bytes: int, cause: str, **sent: Any
) -> tuple[aiohttp.ClientResponse, bytes]:
    """Send a request; return the reply and its decompressed body; only the beginning to quote if the status is not 200.

    Redirects are not followed: they may lead to another host.

    Raises:
        Unavailable: the reply did not come in time (`timeout`), the connection failed (`cause`), or the
            body holds more than `most_bytes` (`bad_reply`).
    """
    import aiohttp

    # No total: `_time_limit` counts it, which also knows of a process that was stopped.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(timeout_s, _CONNECT_TIMEOUT_S))
    request = session.request(method, url, timeout=timeout, allow_redirects=False, **sent)
    server, content = _host(url), bytearray()
    try:
        async with _time_limit(timeout_s), request as response:
            async for received in response.content.iter_any():
                content += received
                # An error is only quoted: the rest of its body is not read.
                if response.status != 200 and len(content) > MOST_QUOTED:
                    break
                if len(content) > most_bytes:
                    problem = f"the reply is longer than {most_bytes} bytes, far more than what was asked for can take"
                    raise Unavailable(problem, cause="bad_reply")
            return response, bytes(content if response.status == 200 else content[:MOST_QUOTED])
    except (aiohttp.ClientError, OSError) as error:
        if type(error) is TimeoutError:
            raise Unavailable(f"{server} gave no reply in {timeout_s:.1f} s", cause="timeout") from None
        check_limits(error)
        if "content-encoding" in repr((error, error.__cause__)).lower():
            raise Unavailable(f"{server} replies in an encoding that cannot be undone", cause="bad_reply") from None
        is_unreachable = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        problem = f"cannot connect to {server}" if is_unreachable else f"the connection to {server} failed"
        number = (type(error) is aiohttp.ClientConnectorError and error.errno) or 0  # negative: of a name's look-up
        reason = os.strerror(number) if number > 0 else type(error).__name__  # its own words may hold a key
        raise Unavailable(f"{problem} ({reason})", cause=cause, away=True, counts=not is_unreachable) from None


def _host(url: str) -> str:
    """Return host and port of a URL: a password may stand before them, a key behind."""
    return urlsplit(url).netloc.rpartition("@")[2]


@asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit a block as `asyncio.timeout` does, and again if this process was stopped (SIGSTOP, a frozen container).

    A timer that fires seconds late shows it. Replies that arrived meanwhile have not been read yet.
    """
    running_loop = asyncio.get_running_loop()
    due = running_loop.time() + 0.99 * seconds  # before the timeout, which it moves

    def extend() -> None:
        if running_loop.time() - due > _STOPPED_S:
            limit.reschedule(running_loop.time() + seconds)

    async with asyncio.timeout(seconds) as limit:
        timer = running_loop.call_at(due, extend)
        try:
            yield
        finally:
            timer.cancel()


def check_url(url: str, *, example: str, allow_password: bool = False) -> None:
    """Raise ConfigError if an address is not http or https.

    The address of an API (`allow_password` is False) must not have a password, a query or a fragment either.
    """
    shown = redact(url.partition("?")[0].partition("#")[0])  # a query may hold a key
    try:
        url_parts = urlsplit(url)
        usable = url_parts.scheme in ("http", "https") and bool(url_parts.hostname) and url_parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{shown!r} is not an http or https address; give one such as {example}")
    if not allow_password and (url_parts.username or url_parts.password):
        raise ConfigError("the server's address holds a user name or password; give the key as api_key instead")
    if not allow_password and ("?" in url or "#" in url):  # paths are appended to it
        raise ConfigError(
            f"the address {shown!r} has a ? or #, but the paths of the API are added to it; give one such as {example}"
        )


def bearer_header(token: str | None, source: str) -> dict[str, str]:
    """Return the header that carries a token from `source`; empty without a token.

    Raises:
        ConfigError: the token cannot be sent in a header. The message does not show it.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{source} holds blanks or characters that no HTTP header may hold; was it cut from a file?")
    return {"Authorization": f"Bearer {token}"}


def about_key(status: int, sent: bool, variable: str) -> str:
    """Return the end of a message about a refusal: where the key comes from and whether it was sent, if that is why."""
    return f" ({'a' if sent else 'no'} key was sent; it is read from {variable})" if status in (401, 403) else ""
