"""No wait is without an end: one thread looks at all that others wait for, names what hangs, and ends the waits.

A thread that works for others (`Watch`, `Worker`) hangs if it finishes nothing and uses no CPU time; a run
(`progressing`), if nothing at all gets on. Looks are counted, not seconds: a process that was stopped, or a clock that
jumped, has missed one look.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import structlog

from reasonrag.core.errors import EX_TEMPFAIL, BackendError, Stalled
from reasonrag.core.secrets import redact
from reasonrag.core.text import printable

log = structlog.get_logger()

STALL_S = 3600.0
"""How long a run may stand still, if nothing else is said."""
_LOOK_S, _LOOKS = 10.0, 30  # the most between two looks, and how many tell that a thread hangs
_LOOKS_THAT_TELL = (3, 6, 12, 24, 48, 96, 192)
_IDLE_SHARE = 0.01  # of a look: CPU time of a thread that hangs
_END_S = 10.0  # for a run that stood still to end itself
_PACKAGE = str(Path(__file__).parents[1])

T = TypeVar("T")
P = ParamSpec("P")

_look_s = _LOOK_S
_changed = threading.Event()  # ends a long wait for the next look
_beats = 0
_looker: threading.Thread | None = None
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def beat() -> None:
    """Note that something in this process got on."""
    global _beats
    _beats += 1


class Watch:
    """A daemon thread, or a run, and those who wait for it. They get an error once it hangs, or has ended.

    Attributes:
        failure: why nothing is answered, while it hangs, or since it has ended.
        ended: done when the thread has ended.
    """

    def __init__(
        self,
        name: str,
        error: Callable[[str], Exception],
        work: Callable[[], object] | None = None,
        *,
        looks: int = _LOOKS,
        processes: Iterable[int] = (),
    ) -> None:
        """Start a thread that does `work`; without, everything in this process is it.

        `error` makes of a message what the waiting get, after so many `looks` at something that hangs. CPU time of
        `processes`, by their ids, counts as that of the thread.
        """
        self.name, self.ended = name, Future[None]()
        self.failure: Exception | None = None
        self._error, self._looks, self._beats = error, looks, 0
        self._clocks = [~pid << 3 | 2 for pid in processes]  # of their CPU time, as Linux numbers them
        self._open: set[Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # that of who waited last
        self._seen, self._slow, self._still = (-1, 0.0), 0, 0
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True) if work else None
        _watches.add(self)
        if self._thread is not None:
            self._thread.start()

    def beat(self) -> None:
        """Count something that was finished."""
        self._beats += 1
        beat()

    def add(self, waiting: Future[T]) -> Future[T]:
        """Watch until this future is done, fail it once nothing can be expected, and return it."""
        global _looker
        if self.failure is not None:
            end([waiting], self.failure)
            return waiting
        self._loop = asyncio._get_running_loop()
        self._open.add(waiting)
        waiting.add_done_callback(self._open.discard)
        if _looker is None or not _looker.is_alive():  # as in a child that was forked
            _looker = threading.Thread(target=_look_on, name="watch", daemon=True)
            _looker.start()
        return waiting

    def look(self) -> None:
        """See whether it gets on if somebody waits; if it does not, say so, or end the waits."""
        if not self._open and self.failure is None:
            self._slow = self._still = 0
            return
        (beats, cpu_s), self._seen = self._seen, (self._beats if self._thread else _beats, self._cpu_s())
        used_s = self._seen[1] - cpu_s
        self._slow = self._slow + 1 if beats == self._seen[0] else 0
        self._still = self._still + 1 if self._slow and used_s < _IDLE_SHARE * _look_s else 0
        if self._thread and self._open and self._slow in _LOOKS_THAT_TELL:
            log.warning(
                f"{self.name}: nothing finished for {self._slow * _look_s:.3g} s",
                waiting=len(self._open),
                thread=self._doing(),
                cpu_s_of_last_look=round(used_s, 1),
            )
        if self._thread and not self._thread.is_alive():
            self._give_up(": its thread has ended")
        elif self._still < self._looks:
            self.failure = None
        elif self.failure is None:
            missing = "nothing finished and no CPU time" if self._thread else "no token, reply or commit"
            self._give_up(f" stands still: {missing} for {self._still * _look_s:.3g} s, {self._doing()}")

    def _run(self, work: Callable[[], object]) -> None:
        clock_of = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_PROCESS_CPUTIME_ID)  # not on macOS
        self._clocks.append(clock_of(threading.get_ident()))
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        found = ": its thread has ended"
        try:
            work()
            end([self.ended])
        except BaseException as error:
            found += f" ({type(error).__name__}: {error})"
        self._give_up(found)
        end([self.ended], self.failure)

    def _give_up(self, found: str) -> None:
        self.failure = self.failure or self._error(self.name + found)
        if waiting := [one for one in list(self._open) if not one.done()]:
            with suppress(Exception):  # as if nobody reads it: the waits end
                _say(str(self.failure), *_stacks())
            end(waiting, self.failure)

    def _cpu_s(self) -> float:
        used_s = 0.0
        for clock in self._clocks:
            with suppress(OSError):  # it has ended
                used_s += time.clock_gettime(clock)
        return used_s

    def _doing(self) -> str:
        """Return where the thread is, in this package and at all; of a run, where most tasks wait."""
        if self._thread is not None:
            return "at " + _innermost(_frames(sys._current_frames().get(self._thread.ident or 0)))
        # Those that wait outside of this package first: the others wait for them.
        found = Counter((_ours(frames[:1]) != [], _wait(frames)) for frames in _tasks())
        waits = sorted(found.items(), key=lambda wait: (wait[0][0], -wait[1]))
        return "; ".join(f"{count} task{'s' * (count > 1)} at {wait}" for (_, wait), count in waits[:4])


class Worker:
    """Calls functions for code on event loops in a daemon thread, one after another.

    The process does not wait for it at its end, as it waits for the threads of a `ThreadPoolExecutor`.
    """

    def __init__(self, name: str, error: type[BackendError], processes: Iterable[int] = ()) -> None:
        """Start the thread, which ends with `aclose` or with this object. Calls fail with `error` if it hangs."""
        self._calls: queue.SimpleQueue[partial[None] | None] = queue.SimpleQueue()
        self._watch = Watch(name, partial(error, cause="stalled"), partial(_serve, self._calls), processes=processes)
        weakref.finalize(self, self._calls.put, None)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns, or raise what it raises, or BackendError (`stalled`) if the thread hangs."""
        return await asyncio.wrap_future(self.begin(function, *args, **kwargs))

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do as `call`, for code without an event loop."""
        result: Future[T] = self._watch.add(Future())
        self._calls.put(partial(_answer, result, partial(function, *args, **kwargs), self._watch.beat))
        return result

    async def aclose(self) -> None:
        """Wait until what was called has ended, if it does not hang."""
        self._calls.put(None)
        with suppress(BackendError):
            await asyncio.wrap_future(self._watch.add(self._watch.ended))


def _serve(calls: queue.SimpleQueue[partial[None] | None]) -> None:
    for call in iter(calls.get, None):
        call()
        del call  # what it holds may be large


def _answer(result: Future[T], function: Callable[[], T], beat: Callable[[], None]) -> None:
    if not result.done():  # neither cancelled nor given up
        try:
            end([result], value=function())
        except BaseException as error:
            end([result], error)
        beat()


@asynccontextmanager
async def progressing(stall_s: float = STALL_S) -> AsyncIterator[None]:
    """End the block with Stalled once nothing in this process gets on for so long. Threads hang before."""
    loop, over = asyncio.get_running_loop(), Future[None]()

    def end_block() -> None:
        with suppress(RuntimeError):  # it has ended
            block.reschedule(0)

    try:
        with limit(stall_s / 2):
            run = Watch("the run", stalled, looks=round(stall_s / _look_s))
            async with asyncio.timeout(None) as block:
                run.add(over).add_done_callback(lambda _: loop.call_soon_threadsafe(end_block))
                yield
    except TimeoutError:
        if over.done():
            over.result()
        raise
    finally:
        over.cancel()


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Give up threads that hang for so long, in the whole process while the block runs; five minutes are the most."""
    global _look_s
    before, _look_s = _look_s, min(_LOOK_S, seconds / _LOOKS)
    _changed.set()
    try:
        yield
    finally:
        _look_s = before


def end(waiting: Iterable[Future[Any]], error: BaseException | None = None, value: object = None) -> None:
    """End waits that have not ended, with an error or a value."""
    for one in waiting:
        with suppress(InvalidStateError):
            if error is None:
                one.set_result(value)
            else:
                one.set_exception(error)


def stalled(message: str) -> Stalled:
    """Return the error of what stood still, which ends a command ten seconds later if it has not ended by itself."""
    if Stalled.ends_process:
        exiting = threading.Timer(_END_S, os._exit, (EX_TEMPFAIL,))
        exiting.daemon = True
        exiting.start()
    return Stalled(f"{message}. Finished work is kept, and the same command goes on from it")


def _look_on() -> None:
    while True:
        _changed.wait(_look_s)
        _changed.clear()
        with suppress(RuntimeError):  # one was added meanwhile
            for watch in list(_watches):
                with suppress(Exception):  # as if nobody reads what it says: the others are looked at
                    watch.look()


def _say(*lines: str) -> None:
    sys.stderr.write("".join(f"{printable(redact(line))}\n" for line in lines))


def _stacks() -> Iterator[str]:
    """Yield a line for each thread, and one for the tasks that wait at the same place; the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for id, frame in sys._current_frames().items():
        yield f"  thread {names.get(id)}: {' < '.join(map(_place, _frames(frame)))}"
    stacks = Counter(" < ".join(map(_place, frames)) for frames in _tasks())
    for calls, count in stacks.most_common(20):
        yield f"  {count} task{'s' * (count > 1)}: {calls}"


def _tasks() -> Iterator[list[FrameType]]:
    """Yield the frames of each task, the innermost first."""
    # Not from `gc.get_objects`: a tuple that another thread is about to resize must not be held.
    for loop in {watch._loop for watch in list(_watches) if watch._loop is not None}:
        for task in asyncio.all_tasks(loop):
            coroutine: Any = task.get_coro()
            frames: list[FrameType] = []
            while (frame := getattr(coroutine, "cr_frame", None)) is not None:
                frames.insert(0, frame)
                coroutine = coroutine.cr_await
            yield frames


def _frames(frame: FrameType | None) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_stack(frame)] if frame else []


def _innermost(frames: list[FrameType]) -> str:
    """Return the innermost place in this package with its caller, and the innermost of all."""
    return ", ".join(dict.fromkeys(map(_place, (*_ours(frames)[:2], *frames[:1]))))


def _ours(frames: list[FrameType]) -> list[FrameType]:
    return [frame for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE)]


def _wait(frames: list[FrameType]) -> str:
    """Return where a task waits, and for what, if its frames say: the address of a server, or a part's `name`."""
    for frame in frames:
        known = frame.f_locals if _ours([frame]) else {}
        with suppress(Exception):  # a plugin's `name` may raise
            asked = known.get("server") or known.get("url") or known["self"].name
            if isinstance(asked, str):
                return f"{_innermost(frames)} for {asked.partition('?')[0]}"  # behind that, there may be a key
    return _innermost(frames)


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
