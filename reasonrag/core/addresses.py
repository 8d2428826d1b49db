"""Equal servers, asked until one answers: one that is away is waited for, or left out while others answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from reasonrag.core.errors import BackendError
from reasonrag.core.http import Retries, Unavailable
from reasonrag.core.slots import AllSlots, Request, SlotCounts, Slots
from reasonrag.core.text import redact

log = structlog.get_logger()

T = TypeVar("T")

_SILENT_S = 5.0  # before a silent server is reported: a quick restart is not worth a line
_REMEMBERED = 10_000  # questions for which the last address is kept


class Address(Slots):
    """A server, and the requests in flight at it."""

    def __init__(self, url: str, concurrency: int | None) -> None:
        super().__init__(concurrency)
        self.url = url
        self.announced = False  # whether it was reported as away


class Addresses:
    """Chooses the server of each request, sends it until it is answered, and waits for servers that are away.

    Attributes:
        slots: those of all servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        concurrency: int | None,
        *,
        retries: Callable[[], Retries],
        patience_s: float,
        name: str,
        error: type[BackendError],
    ) -> None:
        """Take servers that all answer the same.

        Args:
            urls: addresses.
            concurrency: requests in flight at each of them; None finds out (`Slots`).
            retries: makes those of a request. They bound its time at a server that is there, without waits for a slot,
                and failures there, without refusals (429, or 503 of a server that works on other requests).
            patience_s: seconds to wait while none of them answers. An outage uses them up once: each request that is
                left, or comes later, is sent, and fails if it meets no server.
            name: of the model or retriever, for messages.
            error: raised if a request is given up.
        """
        self.all = [Address(url, concurrency) for url in urls]
        self.slots = _together(self.all)
        self._retries = retries
        self._patience_s = patience_s
        self._name = name
        self._error = error
        self._homes: OrderedDict[str, Address] = OrderedDict()

    async def ask(
        self, send: Callable[[Request, str, float], Awaitable[T]], *, priority: int = 0, question: str = ""
    ) -> T:
        """Send a request until it is answered, refused for good or given up (`error`).

        Args:
            send: sends it once, given its slot, an address and the seconds left. It raises `Unavailable` if another
                attempt may succeed, and any other error if it cannot.
            priority: of two that wait, the one with the lower number is first.
            question: its requests stay at one server while that answers.
        """
        address = self.all[0]
        request = Request(address, priority)
        retries, wait = self._retries(), asyncio.timeout(None)  # `drain` ends the wait for a retry

        async def attempt() -> T:
            nonlocal address
            address.retrying.discard(wait)
            left_s = retries.left_s
            if not request.keeps:
                address = self._choose(question, address if retries.failures else None)
                request.slots = address
            try:
                async with request:
                    retries.left_s = left_s  # the wait for a slot does not count
                    reply = await send(request, address.url, left_s)
            except Unavailable as failure:
                if failure.away:
                    self._lost(address, failure)
                address.retrying.add(wait)
                raise
            if address.announced:
                self._announce(address, "the server answers again", away=False)
            return reply

        try:
            async with wait:
                return await retries.run_async(attempt)
        except TimeoutError as ended:
            raise address.drained_by or ended from None
        except Unavailable as last:
            before = f"; before that: {retries.before}" if retries.before and str(retries.before) != str(last) else ""
            message = f"{self._name} gave no answer in {retries.failures} attempts; last: {last}{before}"
            raise self._error(message, cause=last.cause) from last
        finally:
            address.retrying.discard(wait)
            request.slots.release(request)

    def _choose(self, question: str, failed: Address | None) -> Address:
        """Return the address of a question's next request: its last one, or else the one with the most free slots.

        A request that has just `failed` at one goes to another that answers.
        """
        if len(self.all) == 1:
            return self.all[0]
        home = self._homes.get(question)
        answering = [address for address in self.all if address.away_since is None]
        others = [address for address in answering if address is not failed]
        if home is None or home not in others:
            # A request now and then finds out whether a server is back.
            due = [address for address in self.all if address.may_probe()]
            home = due[0] if due else min(others or answering or self.all, key=_load)
            self.all.remove(home)  # equal ones take turns: `min` takes the first
            self.all.append(home)
        if question:
            self._homes[question] = home
            self._homes.move_to_end(question)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return home

    def _lost(self, address: Address, failure: Unavailable) -> None:
        """Note that a server lost a request. If it is away, what waits there goes elsewhere, or patience may end."""
        if address.away_since is None:  # it lost this request alone
            return
        away_since = [address.away_since for address in self.all if address.away_since is not None]
        if len(away_since) < len(self.all):
            self._announce(address, f"a server does not answer ({failure}); the others take its requests")
            address.given_up = False
            address.turn_away(Unavailable(str(failure), cause=failure.cause, away=True, counts=False))
            return
        now = asyncio.get_running_loop().time()
        silent_s = now - max(away_since)
        if silent_s >= _SILENT_S:
            outage = (
                f"the server has not answered for {silent_s:.0f} s ({failure}); waiting up to {self._patience_s:g} s"
            )
            self._announce(address, outage)
        due = min(address.probe_at for address in self.all)  # a Retry-After header sets it too
        if silent_s + due - now < self._patience_s and not address.given_up:
            return
        for other in self.all:  # not failed without an attempt, as the servers may be back
            other.give_up()
        message = f"{self._name} has not answered for {silent_s:.0f} s; last: {failure}"
        raise self._error(message, cause=failure.cause) from failure

    def share(self, other: Addresses) -> None:
        """Count requests together with those of another model at the addresses that both have: it is one engine."""
        theirs = {address.url: address for address in other.all}
        self.all = [theirs.get(address.url, address) for address in self.all]
        self.slots = other.slots if self.all == other.all else _together(self.all)

    def _announce(self, address: Address, message: str, *, away: bool = True) -> None:
        """Log once that a server is away, or back."""
        if address.announced != away:
            address.announced = away
            log.warning(message, name=self._name, url=redact(address.url.partition("?")[0]))


def _together(addresses: Sequence[Address]) -> SlotCounts:
    return addresses[0] if len(addresses) == 1 else AllSlots(addresses)


def _load(address: Address) -> float:
    # Of several that answer, one that fails some requests gets fewer.
    return (address.in_flight + address.waiting + address.losses) / address.limit
