"""A comparison as a list of `reasonrag` commands, each in a process of its own and done once."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import RunError
from reasonrag.storage.files import claim_folder, lock, write_json

_LOOK_S = 0.05  # between two looks at the children


@dataclass(frozen=True, slots=True)
class Stage:
    """One command.

    Attributes:
        arguments: as typed after `reasonrag`.
        out: the folder or file that it writes.
        needs: what other stages write and this one reads. A list whose stages name none is to be run in its order.
    """

    arguments: tuple[str, ...]
    out: Path
    needs: tuple[Path, ...] = ()

    @property
    def line(self) -> str:
        """As typed."""
        return shlex.join(["reasonrag", *self.arguments])


class Plan:
    """A list of commands bound to a folder, which keeps what is done in `plan.json`.

    A command is done once it has ended with exit code 0: one that failed may have left a summary all the same.
    """

    def __init__(self, out: Path, stages: Sequence[Stage], *, grows: bool = False) -> None:
        """Make a folder that of this plan.

        Args:
            out: the folder.
            stages: of the whole plan, whether they are to be run now or not.
            grows: whether it may hold a smaller plan, all of whose commands are among these.

        Raises:
            RunError: another plan's results are in it, or other files.
        """
        self.stages = stages
        self._out = out
        self._file = out / "plan.json"
        claim_folder(out, "plan", already_ours=self._file.exists())
        before = self._read()
        lines = [stage.line for stage in stages]
        if before is not None and before["plan"] != lines and not (grows and set(before["plan"]) <= set(lines)):
            pairs = zip(before["plan"], lines, strict=False)
            told = next((f"{old!r} there, {new!r} now" for old, new in pairs if old != new), "of another length")
            raise RunError(f"{out} holds another plan ({told}); go back to that, or choose a new folder for --out")
        self._done = set(before["done"] if before else ())
        self._write()

    def is_done(self, stage: Stage) -> bool:
        """Whether the command has succeeded, now or before."""
        return stage.line in self._done

    def run(
        self,
        say: Callable[[str], None],
        *,
        only: Collection[Path] | None = None,
        jobs: int = 1,
        keep_going: bool = False,
    ) -> int:
        """Run what is not done yet; each command is said before it runs.

        Args:
            say: gets lines for people.
            only: what the stages to be run write; all stages if None.
            jobs: commands at a time, in the order of the list as far as their needs allow. With more than one, each
                has one thread, and writes into `logs/`.
            keep_going: whether a command that fails ends only what needs it.

        Returns:
            0, or the exit code of the first command that failed or was stopped. One that was stopped ends all.

        Raises:
            RunError: another process is at work in the folder.
        """
        with lock(self._out / ".lock"):
            return _Work(self, say, only, jobs, keep_going).run()

    def done(self, stage: Stage) -> None:
        """Keep that the command has succeeded."""
        self._done.add(stage.line)
        self._write()

    def log(self, number: int) -> Path:
        """Where the output of a command goes that runs beside others."""
        folder = self._out / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{number:03d}.log"

    def _read(self) -> dict[str, list[str]] | None:
        if not self._file.exists():
            return None
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            # `pairs --pair-reward` was called `--reward` when some folders were made.
            return {
                name: [str(line).replace(" --reward judge ", " --pair-reward judge ") for line in found[name]]
                for name in ("plan", "done")
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self._file} cannot be read ({error}); choose a new folder for --out") from error

    def _write(self) -> None:
        lines = [stage.line for stage in self.stages]
        known = {"plan": lines, "done": [line for line in lines if line in self._done]}
        write_json(self._file, known, indent=1)


class _Work:
    """One run of a plan."""

    def __init__(
        self, plan: Plan, say: Callable[[str], None], only: Collection[Path] | None, jobs: int, keep_going: bool
    ) -> None:
        self._plan = plan
        self._say = say
        self._jobs = jobs
        self._keep_going = keep_going
        self._numbers = {stage.line: number for number, stage in enumerate(plan.stages, 1)}
        self._waiting = [stage for stage in plan.stages if only is None or stage.out in only]
        self._running: dict[subprocess.Popen[bytes], Stage] = {}
        self._stopped = 0  # the number of the signal
        self._code = 0

    def run(self) -> int:
        """Until nothing is left to do, or allowed to be done."""
        with self._signals_heeded():
            while self._begin() or self._running:
                time.sleep(_LOOK_S)
                for child in [child for child in self._running if child.poll() is not None]:
                    self._end(self._running.pop(child), child.returncode)
        return self._code or (128 + self._stopped if self._stopped else 0)

    def _begin(self) -> bool:
        """Start as many as may run; whether any waits for one that runs."""
        if self._stopped:
            self._waiting.clear()
        for stage in list(self._waiting):
            if self._plan.is_done(stage):
                self._waiting.remove(stage)
                self._say(f"{self._mark(stage)} done before: {stage.line}")
            elif missing := self._never(stage):
                self._waiting.remove(stage)
                self._say(f"{self._mark(stage)} left out, as {missing} is not there: {stage.line}")
            elif len(self._running) < self._jobs and self._ready(stage):
                self._waiting.remove(stage)
                self._start(stage)
            elif len(self._running) >= self._jobs:
                break
        return bool(self._waiting)

    def _ready(self, stage: Stage) -> bool:
        return all(self._plan.is_done(other) for other in self._plan.stages if other.out in stage.needs)

    def _never(self, stage: Stage) -> Path | None:
        """What it needs and nobody will write any more."""
        coming = {other.out for other in (*self._waiting, *self._running.values())}
        for other in self._plan.stages:
            if other.out in stage.needs and other.out not in coming and not self._plan.is_done(other):
                return other.out
        return None

    def _start(self, stage: Stage) -> None:
        command = [sys.executable, "-m", "reasonrag", *stage.arguments]
        if self._jobs == 1:
            self._say(f"{self._mark(stage)} $ {stage.line}")
            child = subprocess.Popen(command)
        else:
            log = self._plan.log(self._numbers[stage.line])
            self._say(f"{self._mark(stage)} $ {stage.line}  (output: {log})")
            with log.open("ab") as file:
                child = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self._running[child] = stage
        if self._stopped:  # between the last look and here: it has not been told
            child.terminate()

    def _end(self, stage: Stage, code: int) -> None:
        code = 128 - code if code < 0 else code
        if not code:
            self._plan.done(stage)
        else:
            self._code = self._code or code
            if self._jobs > 1 or self._keep_going:
                self._say(f"{self._mark(stage)} ended with exit code {code}: {stage.line}")
        if code >= 128 or (code and not self._keep_going):
            self._waiting.clear()

    def _mark(self, stage: Stage) -> str:
        return f"[{self._numbers[stage.line]}/{len(self._plan.stages)}]"

    @contextlib.contextmanager
    def _signals_heeded(self) -> Iterator[None]:
        """Commands drain on Ctrl-C by themselves, as a terminal sends it to all; a SIGTERM is handed on."""

        def stop(number: int, frame: object) -> None:
            self._stopped = number
            if number == signal.SIGTERM:
                for child in self._running:
                    child.terminate()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
