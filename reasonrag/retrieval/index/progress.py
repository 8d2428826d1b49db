"""How far a build is, without saying who looks."""

from __future__ import annotations

from typing import Protocol


class BuildProgress(Protocol):
    """Told by a build what it does; a terminal, a log or nobody listens."""

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """A stage begins, with `done` of `total` units behind it (of an earlier attempt); total None is unknown."""
        ...

    def advance(self, amount: float = 1.0) -> None:
        """So many more units are done."""
        ...

    def note(self, text: str) -> None:
        """A line worth keeping: what was set aside, what was chosen and why."""
        ...


class Silent:
    """Nobody looks."""

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """Say nothing."""

    def advance(self, amount: float = 1.0) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""
