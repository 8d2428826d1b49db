"""How coroutines run in a process: on uvloop, with worker threads, a limit on standing still, and signals.

`end_on_signals` is the first call of every command, so slow
modules such as asyncio are imported where they are used.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import select
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

STALL_S = 3600.0
"""Default limit on how long a run may make no progress."""
_LOOKS = 20  # Looks are counted, not seconds: a process that was stopped (SIGSTOP) has missed one look.
CLOSE_S = 5.0
"""Limit on closing a thread that may hang."""
_END_S = 10.0  # for a stalled run to end by itself
_ANSWER_S = 2.0  # for an event loop to answer a signal

T = TypeVar("T")
P = ParamSpec("P")

_beats = 0
_on_bus_error: Any = None


def runner() -> asyncio.Runner:
    """Return a runner on uvloop's loop, which takes half of the CPU time of asyncio's; on that without uvloop."""
    import asyncio

    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, as `asyncio.run` does."""
    with closing(main), runner() as running:  # closed even if no loop can be made
        return running.run(main)


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process at once, with exit code 130 or 143, until something is to be drained."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


@contextmanager
def draining(drain: Callable[[int], object]) -> Iterator[None]:
    """Let the event loop call `drain` at the first Ctrl-C or SIGTERM; end the process at once at the second.

    The process also ends if the loop does not answer the first one within `_ANSWER_S`, whatever keeps it busy.
    """
    import asyncio

    loop, arrived, answered = asyncio.get_running_loop(), threading.Event(), threading.Event()
    numbers: list[int] = []

    def answer() -> None:  # between two steps of the loop, so that a commit to the journal is never cut in two
        answered.set()
        drain(numbers[0])

    def receive(number: int, interrupted: object) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            _stop(number, interrupted)
        loop.call_soon_threadsafe(answer)
        arrived.set()

    def watch() -> None:
        arrived.wait()
        if not any(answered.wait(_ANSWER_S / _LOOKS) for _ in range(_LOOKS)):
            _stop(numbers[0], None)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        answered.set()
        arrived.set()  # the thread ends
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, interrupted: object) -> None:
    # An exception could be swallowed by a bare `except` of a
    # library that is being imported, and a stream may be busy.
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # else the pipe is full and not read, and writing would never end
            cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a live display hid it
            os.write(2, cursor + b"stopped; finished work is kept, and the same command goes on\n")
    os._exit(128 + number)


def end_on_bus_error() -> None:
    """Let a file that is cut short while it is mapped into memory end this process in one line.

    The processor raises SIGBUS in the middle of a read, and the interpreter's own handlers would never get to
    run: so this one is the C library's.
    """
    import ctypes

    global _on_bus_error  # the C library holds no reference to it

    def stop(number: int) -> None:
        os.write(2, b"error: a file of an index was cut short while it was in use; bring it back, and begin again\n")
        os._exit(2)

    if hasattr(signal, "SIGBUS") and _on_bus_error is None:
        _on_bus_error = ctypes.CFUNCTYPE(None, ctypes.c_int)(stop)
        ctypes.CDLL(None).signal(signal.SIGBUS, _on_bus_error)


def beat() -> None:
    """Note that something in this process made progress: a token, a reply, a commit."""
    global _beats
    _beats += 1


class Worker:
    """Calls functions for code on event loops in a daemon thread, one after another.

    The process does not wait for it at its end, as it waits for the threads of a `ThreadPoolExecutor`.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, which ends with `aclose` or with this object."""
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        self._end = weakref.finalize(self, self._calls.put, None)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a function that runs in the thread, or raise its error."""
        import asyncio
        from concurrent.futures import Future

        result: Future[T] = Future()
        self._calls.put((result, partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(result)

    async def aclose(self) -> None:
        """Wait until all calls have ended, unless one hangs. A second call does nothing."""
        import asyncio

        if self._end.alive:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.call(int), CLOSE_S)
            self._end()


def _serve(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    for result, function in iter(calls.get, None):
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except BaseException as error:  # SystemExit too: the caller has to learn of it
                result.set_exception(error)
            beat()
        del result, function  # they may hold large tensors


@asynccontextmanager
async def progressing(stall_s: float = STALL_S) -> AsyncIterator[None]:
    """End the block with Stalled once nothing in this process has called `beat` for so long.

    Before that, faulthandler prints where the threads are.
    """
    import asyncio

    from reasonrag.core.errors import EX_TEMPFAIL, Stalled

    loop, finished, limit = asyncio.get_running_loop(), threading.Event(), asyncio.timeout(None)
    waiting_places: list[str] = []

    def expire() -> None:
        waiting_lines = Counter(map(_waits_at, asyncio.all_tasks(loop)))
        waiting_places.extend(f"{count} tasks at {line}" for line, count in waiting_lines.most_common(3))
        limit.reschedule(loop.time())

    def look() -> None:
        quiet_looks, before = 0, -1
        while quiet_looks < _LOOKS and not finished.wait(min(stall_s / _LOOKS, threading.TIMEOUT_MAX)):
            quiet_looks, before = (quiet_looks + 1 if before == _beats else 0), _beats
        if finished.is_set():
            return
        with suppress(Exception):  # stderr is closed, or no file
            faulthandler.dump_traceback()
        # The run ends itself if its event loop still runs, and closes its files.
        loop.call_soon_threadsafe(expire)
        time.sleep(_END_S)
        if Stalled.ends_process:  # the event loop is blocked, or what hangs cannot be closed
            os._exit(EX_TEMPFAIL)

    try:
        async with limit:
            threading.Thread(target=look, name="watchdog", daemon=True).start()
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        reason = "; ".join([f"no token, reply or commit for {stall_s:g} s", *waiting_places])
        message = f"the run stands still: {reason}. Finished work is kept, and the same command goes on from it"
        raise Stalled(message) from None
    finally:
        finished.set()


def _waits_at(task: asyncio.Task[Any]) -> str:
    """Return the line of the innermost coroutine of a task."""
    from pathlib import Path

    # `cr_await` of the last one is a future or a generator of C, which has no frame.
    coroutine: Any = task.get_coro()
    while getattr(coroutine.cr_await, "cr_frame", None) is not None:
        coroutine = coroutine.cr_await
    source_file = Path(coroutine.cr_code.co_filename)
    return f"{source_file.name}:{coroutine.cr_frame.f_lineno} {coroutine.__name__}"
