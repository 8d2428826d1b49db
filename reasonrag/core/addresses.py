"""Equal servers: a question may stay at one of them, and one that dies is left out until it is back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from reasonrag.core.errors import BackendError
from reasonrag.core.http import Unavailable
from reasonrag.core.secrets import redact
from reasonrag.core.slots import AllSlots, Request, SlotCounts, Slots

log = structlog.get_logger()

_SILENT_S = 5.0  # before the console says that a server does not answer: a server that restarts at once is no news
_REMEMBERED = 10_000  # questions whose address is known


@dataclass(eq=False, slots=True)
class Address:
    """A server, and the requests in flight at it.

    Attributes:
        url: address.
        announced: whether the console says that the server is away.
    """

    url: str
    slots: Slots
    announced: bool = False


class Addresses:
    """Chooses the server of each request, and waits for servers that are away.

    Attributes:
        slots: those of all servers.
    """

    def __init__(
        self, urls: Sequence[str], concurrency: int | None, *, patience_s: float, name: str, error: type[BackendError]
    ) -> None:
        """Take servers that all answer the same.

        Args:
            urls: addresses.
            concurrency: requests in flight at each of them; None finds out (`Slots`).
            patience_s: seconds to wait while none of them answers.
            name: of what is asked, for messages.
            error: raised in all requests that wait, once patience ends.
        """
        self.all = [Address(url, Slots(concurrency)) for url in urls]
        self.slots = _together(self.all)
        self._patience_s = patience_s
        self._name = name
        self._error = error
        self._homes: OrderedDict[str, Address] = OrderedDict()

    @asynccontextmanager
    async def serving(self, request: Request, question: str = "") -> AsyncIterator[str]:
        """Choose a server for a request, wait for a slot there, and yield the address; what waits may go elsewhere.

        Raises:
            Unavailable: by the block, or another request found that the server is away; ask again.
            BackendError: no server has answered for `patience_s`, or they all ask to wait for longer.
        """
        address = self._choose(question)
        request.slots = address.slots
        try:
            async with request:
                yield address.url
        except Unavailable as failure:
            self._lost(address, failure)
            raise
        if address.announced:
            self._announce(address, "the server answers again", away=False)

    def _choose(self, question: str) -> Address:
        """Return the address of a question's next request: its last one, or else the one with the most free slots."""
        if len(self.all) == 1:
            return self.all[0]
        home = self._homes.get(question)
        answering = [address for address in self.all if address.slots.away_since is None]
        if home is None or home not in answering:
            # A request now and then finds out whether a server is back.
            due = [address for address in self.all if address.slots.may_probe()]
            home = due[0] if due else min(answering or self.all, key=_load)
            self.all.remove(home)  # equal ones take turns: `min` takes the first
            self.all.append(home)
        if question:
            self._homes[question] = home
            self._homes.move_to_end(question)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return home

    def _lost(self, address: Address, failure: Unavailable) -> None:
        """Note that a server lost a request. If it is away, what waits there goes elsewhere, or ends with patience."""
        if address.slots.away_since is None:  # it lost this request alone
            return
        away_since = [address.slots.away_since for address in self.all if address.slots.away_since is not None]
        if len(away_since) < len(self.all):
            self._announce(address, "a server does not answer; the others take its requests")
            address.slots.turn_away(type(failure)(str(failure), cause=failure.cause, counts=False))
            return
        now = asyncio.get_running_loop().time()
        silent_s = now - max(away_since)
        if silent_s >= _SILENT_S:
            waiting = f"the server has not answered for {silent_s:.0f} s; waiting up to {self._patience_s:g} s"
            self._announce(address, waiting)
        due = min(address.slots.probe_at for address in self.all)  # a server may have said when it is back
        if silent_s + due - now < self._patience_s:
            return
        error = self._error(f"{self._name}: {failure}", cause=failure.cause)
        for address in self.all:
            address.slots.probe_at = now  # a later request asks, and does not wait for longer than these did
            address.slots.turn_away(error)
        raise error from failure

    def share(self, other: Addresses) -> None:
        """Count requests together with those of another model at the addresses that both have: it is one engine."""
        theirs = {address.url: address for address in other.all}
        self.all = [theirs.get(address.url, address) for address in self.all]
        self.slots = other.slots if self.all == other.all else _together(self.all)

    def _announce(self, address: Address, message: str, *, away: bool = True) -> None:
        """Say once that a server is away, or back."""
        if address.announced != away:
            address.announced = away
            log.warning(message, name=self._name, url=redact(address.url.partition("?")[0]))


def _together(addresses: Sequence[Address]) -> SlotCounts:
    return addresses[0].slots if len(addresses) == 1 else AllSlots([address.slots for address in addresses])


def _load(address: Address) -> float:
    # Of several that answer, one that fails some requests gets fewer.
    return (address.slots.in_flight + address.slots.waiting + address.slots.losses) / address.slots.limit
