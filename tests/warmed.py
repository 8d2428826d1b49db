"""Processes that begin with torch, transformers, datasets, peft and TRL imported: forked from one that has them.

A new interpreter needs seconds for these imports alone, which is most of what a short training costs. All else is as
in any process of its own: memory, threads, signals, exit code. One thing is shared: the seed of the hashes. So what is
about starting up, or about two interpreters that have to agree, is run by a new one (`tests.e2e.product.start`).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_IMPORTED = (
    "pytest",
    "reasonrag.cli",
    "reasonrag.online_rl.settings",
    "reasonrag.evaluation.run",
    "datasets",
    "peft",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "transformers.generation.continuous_batching",
    "matplotlib.figure",
)
# Read while these are imported, so the first process has them too.
_FIRST = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(
    function: Callable[..., None], *arguments: Any, environment: Mapping[str, str], timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module (`reasonrag`, `script`) in a process of its own, to its end."""
    with TemporaryDirectory() as folder:
        streams = (Path(folder) / "stdout", Path(folder) / "stderr")
        child = _context().Process(target=_called, args=(streams, dict(environment), function, arguments))
        child.start()
        child.join(timeout_s)
        ended = child.exitcode
        if ended is None:
            child.kill()
        stdout, stderr = (stream.read_text(encoding="utf-8") if stream.exists() else "" for stream in streams)
    assert ended is not None, f"still running after {timeout_s:g} s; it wrote:\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(arguments, ended, stdout, stderr)


def reasonrag(*arguments: str) -> None:
    """What the `reasonrag` script does with these arguments."""
    from reasonrag.__main__ import main

    sys.argv = ["reasonrag", *arguments]
    main()


def script(file: str, *arguments: str) -> None:
    """What `python FILE` does with these arguments."""
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _FIRST.items():
            patch.setenv(name, value)
        ensure_running()
    return context


def _called(
    streams: tuple[Path, ...], environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)
