"""How a command ends on Ctrl-C and SIGTERM, from its first line on. Importing this takes a millisecond."""

import os
import select
import signal
from contextlib import suppress


def end_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this process at once, with exit code 130 or 143, until something is to be drained."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    # An exception could be swallowed by a bare `except` of a library that is being imported, and a stream may be busy.
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # else the pipe is full and not read, and writing would never end
            os.write(2, b"stopped; finished work is kept, and the same command goes on\n")
    os._exit(128 + number)
