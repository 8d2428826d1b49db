"""An event loop whose clock jumps to the next timer: hours of waiting pass in milliseconds, the same in every run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing outside the process may be waited for: sockets and threads do not move this clock."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for something that no timer brings")
        self._loop._now += max(timeout, 0.0)
        return super().select(0)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of `main`, run on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
