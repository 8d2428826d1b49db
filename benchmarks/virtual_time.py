"""An event loop whose clock jumps to the next timer, so that hours of waiting pass in seconds.

Only for code that waits for nothing but timers and other tasks: a thread or a socket would see no time pass.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Returns at once and adds the time that it was asked to wait to `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits for something that no timer will bring")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is the virtual time in seconds since the loop was made."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
