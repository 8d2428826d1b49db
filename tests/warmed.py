"""Processes that begin with torch, transformers, datasets, peft, TRL and the package imported: forked from one that is.

A new interpreter needs seconds for these imports alone, which is most of what a short command costs. All else is as in
any process: memory, threads, signals, exit code. One thing is shared: the seed of the hashes. So a test about starting
up, or about two interpreters that have to agree, asks for a new one (`tests.e2e.product.start(..., fresh=True)`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ports import keep_port

# Read while the libraries are imported, so the process that is forked has them too.
_FIRST = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_READ_AT_IMPORT = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")


class Child:
    """A forked process with the part of `subprocess.Popen` that tests use; its output goes to files."""

    def __init__(
        self, function: Callable[..., None], arguments: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        self.args = arguments
        self._folder = TemporaryDirectory(prefix="warmed-")  # as long as somebody may read it
        self._streams = (Path(self._folder.name) / "stdout", Path(self._folder.name) / "stderr")
        for stream in self._streams:
            stream.touch()
        call = (self._streams, dict(environment), function, arguments)
        self._process = context().Process(target=_call, args=call, daemon=True)
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

    def printed(self) -> str:
        """What has come on stdout so far."""
        return self._streams[0].read_text(encoding="utf-8", errors="replace")

    def said(self) -> str:
        """What has come on stderr so far."""
        return self._streams[1].read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Send SIGSTOP, and return when the process stands still."""
        self.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        while self.poll() is None and stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    function: Callable[..., None], *arguments: Any, environment: Mapping[str, str], timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module (`reasonrag`, `script`) in a forked process, to its end."""
    return ended(Child(function, arguments, environment), timeout_s)


def run_ranks(
    processes: int, function: Callable[..., None], *arguments: Any, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Call a function in several forked processes with the variables that `torchrun` sets; return their outputs joined.

    The exit code is 0, or that of the first process that failed.
    """
    group = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    group["CUDA_VISIBLE_DEVICES"] = ""  # they train on the CPU, and accelerate's barrier would want a GPU for each
    children = []
    with keep_port() as kept:
        group["MASTER_PORT"] = kept.getsockname()[1]
        for rank in range(processes):
            variables = {name: str(value) for name, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            children.append(Child(function, arguments, {**environment, **variables}))
        finished = [ended(child, timeout_s=300.0) for child in children]
    codes = [each.returncode for each in finished if each.returncode]
    outputs = ("".join(each.stdout for each in finished), "".join(each.stderr for each in finished))
    return subprocess.CompletedProcess(arguments, codes[0] if codes else 0, *outputs)


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


class _Stage:
    """The part of `subprocess.Popen` that a plan uses, for `python -m reasonrag ...` in a fork of this process."""

    def __init__(self, command: Sequence[str]) -> None:
        python, flag, module, *arguments = command
        assert (python, flag, module) == (sys.executable, "-m", "reasonrag")
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._pid = os.fork()
        if self._pid:
            return
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            reasonrag(*arguments)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, signal.SIGTERM)


def papers(*arguments: str) -> None:
    """Do what `python -m papers` does, with the commands of its plan in forks instead of new interpreters."""
    from papers import __main__, plan

    plan.subprocess = SimpleNamespace(Popen=_Stage)  # type: ignore[assignment]
    sys.argv = ["papers", *arguments]
    __main__.run()


def source(text: str, *arguments: str) -> None:
    """Do what `python -c TEXT` does with these arguments."""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "source", "exec"), {"__name__": "__main__"})


def script(file: str, *arguments: str) -> None:
    """What `python FILE` does with these arguments."""
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


@cache
def context() -> ForkServerContext:
    """Return the context whose processes are forked from the one that has everything imported."""
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
    if any(environment.get(name, "") != _FIRST.get(name, "") for name in _READ_AT_IMPORT):
        # The preloaded libraries read the environment of the server; every user looks these constants up in the module.
        for name in ("huggingface_hub.constants", "datasets.config"):
            importlib.reload(sys.modules[name])
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    function(*arguments)
