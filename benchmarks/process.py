"""Processes of a benchmark: their memory, and functions called in one of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def memory_bytes(kind: str, pid: int | str = "self") -> float:
    """Return what the kernel counts of a process: `VmRSS` (resident), of that `RssAnon` (backed by no file) and
    `RssFile`, or `VmHWM`, the peak of `VmRSS`, which unlike `ru_maxrss` is without that of its parent.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process, which begins with what is imported here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()
