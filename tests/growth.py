"""How the CPU time of reading a text grows with its length, whatever else the machine does."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import NamedTuple

TIMES = 4
# A reader that is quadratic takes `TIMES` squared, 16 times as long, for a text that is `TIMES` times as long.
LIMIT = 10
# Less than this is not measured well.
_LEAST_S = 0.004


class Growth(NamedTuple):
    """How many times as long the long text takes, and its CPU seconds."""

    ratio: float
    seconds: float


def growth(read: Callable[[str], object], text: Callable[[int], str], size: int) -> Growth:
    """Compare the text of `TIMES * size` characters with that of `size`.

    A ratio that is too large is measured again: what disturbs a machine does not come four times, a slow reader does.
    """
    least = Growth(math.inf, 0.0)
    for _ in range(4):
        short, long = _cpu_s(read, text(size)), _cpu_s(read, text(TIMES * size))
        least = min(least, Growth(long / max(short, _LEAST_S), long))
        if least.ratio < LIMIT:
            break
    return least


def _cpu_s(read: Callable[[str], object], text: str) -> float:
    """Return seconds of a core, without the garbage collector: it looks at what other tests left behind."""
    gc.disable()
    began = time.process_time()
    read(text)
    took = time.process_time() - began
    gc.enable()
    return took
