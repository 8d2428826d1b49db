"""Calls to servers: one retry loop, the `Retry-After` header, and checks of addresses and tokens.

A function that sends a request raises `Unavailable` if another attempt may succeed, and any other error if it cannot:

    retries = Retries(deadline_s=300, max_retries=5)
    reply = await retries.run_async(send)  # or retries.run(send), if `send` is not a coroutine function

`Addresses.ask` also knows how many requests a server takes, and waits for one that is away.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from reasonrag.core.errors import ConfigError, check_limits
from reasonrag.core.text import MOST_QUOTED, excerpt, redact

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

TOKEN_ENV = "REASONRAG_TOKEN"
"""Environment variable with the token that a retrieval server asks for, or the proxy in front of it."""

AWAY = frozenset({502, 503, 504})
"""Statuses of a proxy while its server restarts; a full server may send 503, too."""

RETRIES: Counter[str] = Counter()
"""Retries of this process by cause, for its progress line."""

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 30.0
_STOPPED_S = 2.0
_PERMANENT_5XX = frozenset({501, 505})  # the server will never support the request
_jitter = random.Random()  # not the global generator: a retry must not shift the draws of a seeded run


@dataclass(eq=False)
class Unavailable(Exception):
    """A transient failure; a retry may succeed.

    Attributes:
        cause: short name under which the failure is counted; `timeout` without a reply in time.
        status: HTTP status of the reply, 0 without one.
        retry_after_s: seconds that the server asked to wait, or None without such a header.
        away: whether the server is not there, or does not serve at present: it is waited for, whatever the deadline.
        counts: whether this failure uses up one of `max_retries`. One of a server that is away does if the request had
            come there, as the server may have died of it.
    """

    message: str
    _: KW_ONLY
    cause: str = "unreachable"
    status: int = 0
    retry_after_s: float | None = None
    away: bool = False
    counts: bool = True


@dataclass(kw_only=True)
class Retries:
    """The retries of one request, bounded by number and by time. The clock starts when the object is created.

    Attributes:
        deadline_s: seconds for the request with all its retries and waits.
        max_retries: further attempts after the first one.
        first_wait_s: wait before the first retry. It doubles with every further retry, to 30 s, with jitter.
        wait_s: computes the wait from the number of failures so far; replaces both the doubling and `Retry-After`.
        failures: attempts that failed.
        last, before: the latest failure and the one before it, or None.
    """

    deadline_s: float
    max_retries: int
    first_wait_s: float = 0.5
    wait_s: Callable[[int], float] | None = None
    failures: int = field(default=0, init=False)
    last: Unavailable | None = field(default=None, init=False)
    before: Unavailable | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._counted = 0  # failures that use up one of `max_retries`
        self._waits = 0  # since the server was away
        self.left_s = self.deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a millisecond: clients read a timeout of 0 as "no timeout"."""
        return max(self._ends_at - time.monotonic(), 0.001)

    @left_s.setter
    def left_s(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a function, with retries.

        Raises:
            Unavailable: the last failure, if no attempt is left or the next one would begin after the deadline.
        """
        import stamina

        return stamina.retry(on=self._next_wait, attempts=None, timeout=None)(call)()

    async def run_async(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a coroutine function, with retries, as `run`."""
        try:  # without stamina, which takes longer to set up than most requests to send
            return await call()
        except Unavailable as error:
            failures = [error]

        async def next_attempt() -> T:
            if failures:
                raise failures.pop()
            return await call()

        return await self.run(next_attempt)

    def _next_wait(self, error: Exception) -> float | bool:
        """Return the seconds until the next attempt, or False to give up: stamina's backoff hook."""
        if not isinstance(error, Unavailable):
            return False
        self.before, self.last = self.last, error
        self.failures += 1
        self._counted += error.counts
        self._waits = 0 if error.away else self._waits + 1
        if error.away:
            wait_s, self.left_s = 0.0, self.deadline_s
        elif self.wait_s is not None:
            wait_s = self.wait_s(self.failures)
        else:
            wait_s = (error.retry_after_s or 0.0) + backoff(self._waits, self.first_wait_s, _LONGEST_WAIT_S)
        if self._counted > self.max_retries or wait_s >= self._ends_at - time.monotonic():
            return False
        RETRIES[error.cause] += 1
        return wait_s


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit a block as `asyncio.timeout` does, and again if this process was stopped (SIGSTOP, a frozen container).

    A timer that fires seconds late shows it. Replies that arrived meanwhile have not been read yet.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def end(due: float) -> None:
        nonlocal timer
        now = loop.time()
        if now - due > _STOPPED_S:
            timer = loop.call_at(now + seconds, end, now + seconds)
        else:
            limit.reschedule(now)

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, end, loop.time() + seconds)
        try:
            yield
        finally:
            timer.cancel()


def backoff(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after `failures` failed attempts: doubling, at most `longest_s`, with jitter."""
    doublings = min(failures - 1, 30)  # 2.0**1024 would overflow
    return min(first_s * 2.0**doublings, longest_s) * _jitter.uniform(0.5, 1.0)


def is_transient(status: int) -> bool:
    """Return whether a request with this HTTP status may succeed if it is sent again.

    >>> [is_transient(status) for status in (404, 429, 503, 501)]
    [False, True, True, False]
    """
    return status in (408, 425, 429) or (status >= 500 and status not in _PERMANENT_5XX)


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds in a `Retry-After` header (RFC 9110, sec. 10.2.3: a number or a date), or None.

    >>> parse_retry_after("2"), parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), parse_retry_after("soon")
    (2.0, 0.0, None)
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


async def exchange(
    session: aiohttp.ClientSession, method: str, url: str, timeout_s: float, most_bytes: int, cause: str, **sent: Any
) -> tuple[aiohttp.ClientResponse, bytes]:
    """Send a request; return the reply and its decompressed body; only the beginning to quote if the status is not 200.

    Redirects are not followed: they may lead to another host.

    Raises:
        Unavailable: the reply did not come in time (`timeout`), the connection failed (`cause`), or the body holds more
            than `most_bytes` (`bad_reply`).
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(timeout_s, _CONNECT_TIMEOUT_S))
    request = session.request(method, url, timeout=timeout, allow_redirects=False, **sent)
    server, body = urlsplit(url).netloc.rpartition("@")[2], bytearray()  # without a password
    try:
        async with time_limit(timeout_s), request as response:
            async for piece in pieces(response, most_bytes):
                body += piece
                if response.status != 200 and len(body) > MOST_QUOTED:
                    return response, bytes(body[:MOST_QUOTED])
            return response, bytes(body)
    except (aiohttp.ClientError, OSError) as error:
        if type(error) is TimeoutError:
            raise Unavailable(f"{server} gave no reply in {timeout_s:.1f} s", cause="timeout") from None
        check_limits(error)
        met = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        what = f"the connection to {server} failed" if met else f"cannot connect to {server}"
        number = (type(error) is aiohttp.ClientConnectorError and error.errno) or 0  # negative: of a name's look-up
        why = type(error).__name__ if met else os.strerror(number) if number > 0 else excerpt(str(error.args[-1]))
        raise Unavailable(f"{what} ({why})", cause=cause, away=True, counts=met) from None  # its words may hold a key


async def pieces(response: aiohttp.ClientResponse, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body of a reply as it comes, decompressed, up to a limit; see `exchange`."""
    read = 0
    async for piece in response.content.iter_any():
        read += len(piece)
        if read > most_bytes:
            what = f"the reply is longer than {most_bytes} bytes, far more than what was asked for can take"
            raise Unavailable(what, cause="bad_reply")
        yield piece


def check_url(url: str, *, example: str, allow_password: bool = False) -> None:
    """Raise if a server's address cannot be used.

    Raises:
        ConfigError: it is not an http or https address, or it holds a password where a key belongs elsewhere.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        shown = redact(url.partition("?")[0])  # a query may hold a key
        raise ConfigError(f"{shown!r} is not an http or https address; give one such as {example}")
    if not allow_password and (parts.username or parts.password):
        raise ConfigError("the server's address holds a user name or password; give the key as api_key instead")


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
