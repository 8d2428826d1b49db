from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future

import pytest

from reasonrag.core import watch
from reasonrag.core.errors import RetrievalError, RunError
from reasonrag.core.watch import Watch, Worker


def test_who_waits_for_a_thread_that_has_ended_gets_an_error():
    die = threading.Event()

    def work() -> None:
        die.wait()
        raise OSError("no disk")

    thread = Watch("the writer", RunError, work)
    waiting: Future[None] = thread.add(Future())

    async def wait() -> None:
        die.set()
        await asyncio.wrap_future(thread.add(Future()))

    with pytest.raises(RunError, match=r"the writer: its thread has ended \(OSError: no disk\)"):
        asyncio.run(wait())
    assert isinstance(waiting.exception(), RunError)
    for late in (Future(), thread.ended):
        with pytest.raises(RunError, match="no disk"):
            thread.add(late).result()


def test_a_thread_that_works_or_whose_process_was_stopped_is_not_given_up():
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pass

    thread = Watch("busy", RunError, work)
    with watch.limit(0.3), pytest.raises(TimeoutError):
        thread.add(Future()).result(0.5)
    stop.set()
    thread.add(thread.ended).result()


def test_a_forked_child_looks_too():
    never = threading.Event()
    with watch.limit(0.3):
        with pytest.raises(RunError, match="stands still"):
            Watch("in the parent", RunError, never.wait).add(Future()).result(60)
        child = os.fork()
        if not child:
            waiting = Watch("in the child", RunError, never.wait).add(Future[None]())
            os._exit(7 if "stands still" in str(waiting.exception(60)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_thread_that_waits_for_processes_is_given_up_once_they_hang():
    busy = multiprocessing.get_context("fork").Process(target=burn)
    busy.start()
    thread = Worker("the encoder", RetrievalError, [busy.pid])
    try:
        with watch.limit(0.3):
            waiting = thread.begin(busy.join)
            with pytest.raises(TimeoutError):
                waiting.result(0.6)
            os.kill(busy.pid, signal.SIGSTOP)
            for given_up in (waiting, thread.begin(os._exit, 1)):
                with pytest.raises(RetrievalError, match=r"the encoder stands still: .* popen_fork\.py") as stalled:
                    given_up.result(60)
                assert stalled.value.cause == "stalled"
            busy.kill()
            while (later := thread.begin(int)).exception(60) is not None:
                assert "stands still" in str(later.exception())
        assert later.result() == 0
    finally:
        busy.kill()


def burn() -> None:
    while True:
        pass
