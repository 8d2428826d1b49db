"""Processes that begin with torch, transformers, datasets, peft, TRL and the package imported: forked from one that is.

A new interpreter needs seconds for these imports alone, which is most of what a short command costs. All else is as in
any process: memory, threads, signals, exit code. One thing is shared: the seed of the hashes. So a test about starting
up, or about two interpreters that have to agree, asks for a new one (`tests.e2e.product.start(..., fresh=True)`).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

# Read while the libraries are imported, so the process that is forked has them too.
_FIRST = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class Child:
    """A forked process with the part of `subprocess.Popen` that tests use; its output goes to files."""

    def __init__(
        self, function: Callable[..., None], arguments: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        self.args = arguments
        folder = Path(mkdtemp(prefix="warmed-"))
        self._streams = (folder / "stdout", folder / "stderr")
        for stream in self._streams:
            stream.touch()
        call = (self._streams, dict(environment), function, arguments)
        self._process = _context().Process(target=_call, args=call, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(argument) for argument in self.args], timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, then return stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = (stream.read_text(encoding="utf-8", errors="replace") for stream in self._streams)
        return stdout, stderr

    def said(self) -> str:
        """What has come on stderr so far."""
        return self._streams[1].read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    function: Callable[..., None], *arguments: Any, environment: Mapping[str, str], timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module (`reasonrag`, `script`) in a forked process, to its end."""
    return ended(Child(function, arguments, environment), timeout_s)


def ended(child: Child | subprocess.Popen[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a process; kill it if it does not come."""
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        stdout, stderr = child.communicate()
        raise AssertionError(f"still running after {timeout_s:g} s; it wrote:\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


def reasonrag(*arguments: str) -> None:
    """What the `reasonrag` script does with these arguments."""
    from reasonrag.cli import main

    sys.argv = ["reasonrag", *arguments]
    main()


def script(file: str, *arguments: str) -> None:
    """What `python FILE` does with these arguments."""
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _FIRST.items():
            patch.setenv(name, value)
        ensure_running()
    return context


def _call(
    streams: tuple[Path, ...], environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # The standard streams were made for a terminal or a pipe; these are files, of UTF-8 as in a new interpreter.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    function(*arguments)
