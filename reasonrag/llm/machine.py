"""What a model may take of this machine: memory and CPU threads.

A process that takes too much memory is killed without a message. Threads of a matrix product wait for the slowest of
them at its end, and spin while they wait: on cores that others use, a second one can make it several times slower.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from reasonrag.core.errors import ConfigError
from reasonrag.llm.model_folder import local_folder

_CGROUP = Path("/sys/fs/cgroup")
# Files of a container's limit and use, and the entry of memory.stat that it would give back: version 2, then 1.
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_LARGE = 100_000_000  # bytes of a model that takes long enough to load that a line is worth it


class Weights(NamedTuple):
    """What the files of a model hold."""

    parameters: int
    bytes: int

    def bytes_as(self, dtype: str | None) -> int:
        """Return the bytes in memory as `float32`, `bfloat16`, ...; as in the files if None."""
        if dtype is None:
            return self.bytes
        return self.parameters * (4 if dtype == "float32" else 8 if dtype == "float64" else 2)


def weights_of(path_or_name: str, revision: str | None = None) -> Weights | None:
    """Return the weights of a folder, or of a Hub model that is in the local cache; None if they are not known.

    Only the headers of the safetensors files are read.
    """
    folder = local_folder(path_or_name, revision)
    if folder is None:
        return None
    parameters = size = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            for name, tensor in header.items():
                if name != "__metadata__":
                    parameters += prod(tensor["shape"])
                    size += tensor["data_offsets"][1] - tensor["data_offsets"][0]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
            return None  # loading the model reports the problem
    return Weights(parameters, size) if size else None


def free_memory() -> int | None:
    """Return the bytes that this process can still take, of the machine and of its container; None if unknown."""
    try:
        import psutil
    except ImportError:
        return None
    free = int(psutil.virtual_memory().available)
    for limit, used, statistics, cache in _LIMITS:
        try:
            room = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            given_back = dict(line.split() for line in (_CGROUP / statistics).read_text().splitlines())
            free = min(free, room + int(given_back.get(cache, 0)))
        except (OSError, ValueError):  # "max", or no such file: no limit
            continue
    return max(free, 0)


def require_memory(
    path_or_name: str,
    dtype: str | None,
    *,
    copies: int = 1,
    revision: str | None = None,
    doing: str,
    remedy: str,
    instead: tuple[str | None, int, str],
) -> None:
    """Raise if the weights alone do not fit into memory, `copies` times: with gradients and what an optimizer keeps.

    `instead` are another dtype and number of copies, and the flags that choose them: named first if they fit.

    Raises:
        ConfigError: the model does not fit; names the memory that it needs, the free memory and the `remedy`.
    """
    weights, free = weights_of(path_or_name, revision), free_memory()
    if weights is None or free is None or copies * weights.bytes_as(dtype) <= free:
        return
    other_dtype, fewer, flags = instead
    fits = fewer * weights.bytes_as(other_dtype) <= free
    raise ConfigError(
        f"{path_or_name}: {doing} takes at least {gigabytes(copies * weights.bytes_as(dtype))} of memory "
        f"({weights.parameters / 1e9:,.2f} billion parameters, {dtype or 'as in the files'}), and "
        f"{gigabytes(free)} are free; {f'take {flags}, ' if fits else 'take '}{remedy}",
        add=flags if fits else "",
    )


def gigabytes(size: float) -> str:
    """Return a number of bytes for people.

    >>> gigabytes(536_000_000), gigabytes(15.2e9)
    ('.54 GB', '15 GB')
    """
    return f"{size / 1e9:.2g}".removeprefix("0") + " GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"


def size_if_large(path_or_name: str, revision: str | None = None) -> str:
    """Return the size of a model that takes long to load; "" for a small one, or if the size is unknown."""
    weights = weights_of(path_or_name, revision)
    return gigabytes(weights.bytes) if weights is not None and weights.bytes > _LARGE else ""


# The matrices of a smaller model are too small to be split.
_SMALL = 20_000_000

# Twice the threads are taken if they are so many times as fast: else they mostly wait for each other.
_PAYS = 1.3
_TURNS = 5


def choose_threads(model: Any) -> int:
    """Return how many threads torch should use for a model; for one on a GPU, as many as before.

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
