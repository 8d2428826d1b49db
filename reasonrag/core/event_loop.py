"""Run coroutines on the event loop of uvloop, which takes half of the CPU time of asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

T = TypeVar("T")


def runner() -> asyncio.Runner:
    """Return a runner on uvloop's loop; on asyncio's if uvloop is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, as `asyncio.run` does."""
    with closing(main), runner() as running:  # closed even if no loop can be made
        return running.run(main)
