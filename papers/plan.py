"""A comparison as a list of `reasonrag` commands; each runs in its own process, and once."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.storage.files import require_json, write_json
from reasonrag.storage.folder import Folder

_POLL_S = 0.05  # between two checks whether a child process has ended


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a plan, and the files that it needs and writes."""

    arguments: tuple[str, ...]  # what a person would type after `reasonrag`
    out: Path  # the folder or file that the command writes
    needs: tuple[Path, ...] = ()  # outputs of other commands that this one reads

    @classmethod
    def writing(cls, out: Path, *arguments: str, needs: tuple[Path, ...] = ()) -> Stage:
        """Return a command with `--out` at its end."""
        return cls((*arguments, "--out", str(out)), out, needs)

    @property
    def line(self) -> str:
        return shlex.join(["reasonrag", *self.arguments])


class Plan:
    """A list of commands bound to a folder; `plan.json` there lists those that are done, and what each has cost.

    A command is done if it ended with exit code 0: one that failed may have written a summary too. `cpu_s` has the CPU
    seconds of a command by its line, attempts that were killed included; those of this version and later.
    """

    def __init__(self, out: Path, stages: Sequence[Stage]) -> None:
        """Bind a folder to all commands. They may extend the plan that the folder holds already.

        Raises:
            RunError: the folder holds a plan with other commands, or other files.
        """
        self.stages = stages
        self.out = out
        self._file = out / "plan.json"
        self._folder = Folder(out, "plan", self._file.name)
        self._folder.claim()
        before = self._read()
        lines = {stage.line for stage in stages}
        others = [line for line in before["plan"] if line not in lines]
        if others:
            raise RunError(
                f"{out} holds another plan, with {others[0]!r}; repeat the command that made it, or choose a new "
                "folder for --out"
            )
        self._done = set(before["done"])
        self.cpu_s: dict[str, float] = before["cpu_s"]
        self._write()

    def is_done(self, stage: Stage) -> bool:
        """Return whether the command has succeeded, now or in an earlier run."""
        return stage.line in self._done

    def run(self, show: Callable[[str], None], *, only: Collection[Path] | None = None, jobs: int = 1) -> int:
        """Run what is not done yet. A command that fails ends only those that need its output.

        Args:
            show: prints a line; every command is shown before it runs.
            only: outputs of the commands to run; None runs all.
            jobs: commands at a time, in the order of the list as far as their needs allow. With more than one, each
                has one thread and writes its output into `logs/`.

        Returns:
            0, or the exit code of the first command that failed. A command that was stopped by a signal ends all.

        Raises:
            RunError: another process works in the folder.
        """
        self._show, self._jobs = show, jobs
        self._waiting = [stage for stage in self.stages if only is None or stage.out in only]
        self._running: dict[subprocess.Popen[bytes], Stage] = {}
        self._signal = self._exit_code = 0
        with self._folder.locked(), self._handle_signals():
            while self._start_ready() or self._running:
                time.sleep(_POLL_S)
                for child in list(self._running):
                    before = _cpu_s_of_ended_children()
                    if child.poll() is not None:
                        self._end(self._running.pop(child), child.returncode, _cpu_s_of_ended_children() - before)
        if self._signal:
            self._show("stopped; what is finished is kept, and the same command goes on")
        return self._exit_code or (128 + self._signal if self._signal else 0)

    def done(self, stage: Stage) -> None:
        self._done.add(stage.line)
        self._write()

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {"plan": [], "done": [], "cpu_s": {}}
        plan = require_json(self._file, "choose a new folder for --out")
        try:
            # `pairs --pair-reward` was called `--reward` when some folders were made.
            lines = {
                name: [str(line).replace(" --reward judge ", " --pair-reward judge ") for line in plan[name]]
                for name in ("plan", "done")
            }
            return {**lines, "cpu_s": {str(line): float(cost) for line, cost in plan.get("cpu_s", {}).items()}}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self._file} cannot be read ({error}); choose a new folder for --out") from error

    def _write(self) -> None:
        lines = [stage.line for stage in self.stages]
        done = [line for line in lines if line in self._done]
        write_json(self._file, {"plan": lines, "done": done, "cpu_s": self.cpu_s}, indent=1)

    def _start_ready(self) -> bool:
        """Start as many commands as may run; return whether any waits for one that runs."""
        if self._signal:
            self._waiting.clear()
        for stage in list(self._waiting):
            unmet = [other for other in self.stages if other.out in stage.needs and not self.is_done(other)]
            lost = [other for other in unmet if other not in (*self._waiting, *self._running.values())]
            if self.is_done(stage):
                self._waiting.remove(stage)
                self._show(f"{self._mark(stage)} done before: {stage.line}")
            elif lost:
                self._waiting.remove(stage)
                self._show(f"{self._mark(stage)} left out, because {lost[0].out} is missing: {stage.line}")
            elif len(self._running) >= self._jobs:
                break
            elif not unmet:
                self._waiting.remove(stage)
                self._start(stage)
        return bool(self._waiting)

    def _start(self, stage: Stage) -> None:
        command = [sys.executable, "-m", "reasonrag", *stage.arguments]
        if self._jobs == 1:
            self._show(f"{self._mark(stage)} $ {stage.line}")
            child = subprocess.Popen(command)
        else:
            logs = self.out / "logs"
            logs.mkdir(exist_ok=True)
            log = logs / f"{self._number(stage):03d}.log"
            self._show(f"{self._mark(stage)} $ {stage.line}  (output: {log})")
            with log.open("ab") as file:
                child = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self._running[child] = stage
        if self._signal:  # it arrived while the child was being started, so the handler did not see the child
            child.terminate()

    def _end(self, stage: Stage, code: int, cpu_s: float) -> None:
        code = 128 - code if code < 0 else code
        self.cpu_s[stage.line] = round(self.cpu_s.get(stage.line, 0.0) + cpu_s, 3)
        self._write()
        if not code:
            self.done(stage)
            return
        self._exit_code = self._exit_code or code
        self._show(f"{self._mark(stage)} ended with exit code {code}: {stage.line}")
        if code >= 128:
            self._waiting.clear()

    def _mark(self, stage: Stage) -> str:
        return f"[{self._number(stage)}/{len(self.stages)}]"

    def _number(self, stage: Stage) -> int:
        return self.stages.index(stage) + 1

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Pass SIGTERM on to the commands; a terminal sends Ctrl-C to all of them by itself, and they drain."""

        def stop(number: int, frame: object) -> None:
            self._signal = number
            if number == signal.SIGTERM:
                for child in self._running:
                    child.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _cpu_s_of_ended_children() -> float:
    """Return the CPU seconds of all child processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
