"""Several servers of one model: a question stays at one of them, and one that dies is left out until it is back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from reasonrag.core.http import Away
from reasonrag.core.slots import AllSlots, SlotCounts, Slots

log = structlog.get_logger()

_SILENT_S = 5.0  # before the console says that a server does not answer: a server that restarts at once is no news
_REMEMBERED = 10_000  # questions whose address is known


@dataclass(eq=False, slots=True)
class Address:
    """A server, and the requests in flight at it.

    Attributes:
        url: address without a slash at its end.
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

    def __init__(self, urls: Sequence[str], concurrency: int | None, *, patience_s: float, name: str) -> None:
        """Take servers that all have the same model.

        Args:
            urls: addresses.
            concurrency: requests in flight at each of them; None finds out (`Slots`).
            patience_s: seconds to wait while none of them answers.
            name: of the model, for messages.
        """
        self.all = [Address(url.rstrip("/"), Slots(concurrency)) for url in urls]
        self.slots = _together(self.all)
        self._patience_s = patience_s
        self._name = name
        self._homes: OrderedDict[str, Address] = OrderedDict()

    def choose(self, question: str) -> Address:
        """Return the address of a question's next request: its last one, or else the one with the most free slots."""
        if len(self.all) == 1:
            return self.all[0]
        home = self._homes.get(question)
        answering = [address for address in self.all if address.slots.away_since is None]
        if home is None or home not in answering:
            # A request now and then finds out whether a server is back.
            due = [address for address in self.all if address.slots.may_probe()]
            home = due[0] if due else min(answering or self.all, key=_load)
        if question:
            self._homes[question] = home
            self._homes.move_to_end(question)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return home

    def lost(self, address: Address, failure: Away) -> bool:
        """Note that an address is away; return whether to go on, there or at another address.

        What waits there goes elsewhere if there is a server that answers, and ends if none has for `patience_s`.
        """
        if address.slots.away_since is None:  # it lost this request alone
            return True
        silent_s = self._silent_s()
        if silent_s is None:
            self._announce(address, "a server does not answer; the others take its requests")
        elif silent_s >= _SILENT_S:
            waiting = f"the server has not answered for {silent_s:.0f} s; waiting up to {self._patience_s:g} s"
            self._announce(address, waiting)
        if silent_s is None:
            address.slots.turn_away(failure)
            return True
        now = asyncio.get_running_loop().time()
        due = min(address.slots.probe_at for address in self.all)  # a server may have said when it is back
        if silent_s + due - now < self._patience_s:
            return True
        for address in self.all:
            address.slots.probe_at = now  # a later request asks, and does not wait for longer than these did
            address.slots.turn_away(failure)
        return False

    def answered(self, address: Address) -> None:
        """Note that an address answers."""
        if address.announced:
            self._announce(address, "the server answers again", away=False)

    def share(self, other: Addresses) -> None:
        """Count requests together with those of another model at the addresses that both have: it is one engine."""
        theirs = {address.url: address for address in other.all}
        self.all = [theirs.get(address.url, address) for address in self.all]
        self.slots = other.slots if self.all == other.all else _together(self.all)

    def _announce(self, address: Address, message: str, *, away: bool = True) -> None:
        """Say once that a server is away, or back."""
        if address.announced != away:
            address.announced = away
            log.warning(message, llm=self._name, url=address.url)

    def _silent_s(self) -> float | None:
        """Return how long none of the servers has answered; None while one does."""
        since = [address.slots.away_since for address in self.all]
        if None in since:
            return None
        return asyncio.get_running_loop().time() - max(time for time in since if time is not None)


def _together(addresses: Sequence[Address]) -> SlotCounts:
    return addresses[0].slots if len(addresses) == 1 else AllSlots([address.slots for address in addresses])


def _load(address: Address) -> float:
    return (address.slots.in_flight + address.slots.waiting) / address.slots.limit
