"""How many CPU threads a model computes with: on cores that others use, a second one can make it several times slower.

Threads of a matrix product wait for the slowest of them at its end, and spin while they wait. Imports torch late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

# The matrices of a smaller model are too small to be split.
_SMALL = 20_000_000

# Twice the threads are taken if they are so many times as fast: else they mostly wait for each other.
_PAYS = 1.3
_TURNS = 5


def choose_threads(model: Any) -> int:
    """Return how many threads torch should use for a model; on a GPU, those that it has.

    In this order: one for a model below 20 million parameters; OMP_NUM_THREADS; the number that multiplies
    matrices fastest at this moment, which takes about a second.
    """
    import torch

    if next(model.parameters()).device.type != "cpu":
        return int(torch.get_num_threads())
    if is_small(model):
        return 1
    if "OMP_NUM_THREADS" in os.environ:
        return int(torch.get_num_threads())
    return fastest(torch.get_num_threads(), _product_s)


def is_small(model: Any) -> bool:
    """Return whether a model has too few parameters for a second thread to pay."""
    return bool(sum(weights.numel() for weights in model.parameters()) < _SMALL)


def fastest(most: int, seconds: Callable[[int], float]) -> int:
    """Return the number of threads, a power of two up to `most`, beyond which twice as many do not pay.

    Args:
        most: to try.
        seconds: returns how long some work takes with so many threads.

    >>> fastest(8, {1: 8.0, 2: 4.2, 4: 2.3, 8: 2.2}.__getitem__), fastest(2, {1: 8.0, 2: 7.0}.__getitem__)
    (4, 1)
    """
    counts = [2**power for power in range(most.bit_length())]
    # In turns, so that whatever else the machine does hits all alike.
    turns = [{count: seconds(count) for count in counts} for _ in range(_TURNS)]
    took = {count: median(turn[count] for turn in turns) for count in counts}
    best = 1
    for count in counts:
        if took[count] * _PAYS <= took[best]:
            best = count
    return best


def _product_s(threads: int) -> float:
    """Return the seconds of a matrix product, of the size of a layer and a short prompt."""
    import torch

    left, right, before = torch.ones(128, 1024), torch.ones(1024, 4096), torch.get_num_threads()
    torch.set_num_threads(threads)
    began = time.perf_counter()
    left @ right
    took = time.perf_counter() - began
    torch.set_num_threads(before)
    return took
