"""A comparison as a list of `reasonrag` commands; each runs in its own process, and once."""

from __future__ import annotations

import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import RunError
from reasonrag.rounds import serving
from reasonrag.storage.files import require_json, write_json
from reasonrag.storage.folder import Folder

ADDRESS = "http://127.0.0.1:8193/v1"  # of a model that is served


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a plan, and the files that it needs and writes."""

    arguments: tuple[str, ...]  # what a person would type after `reasonrag`
    out: Path  # the folder or file that the command writes
    needs: tuple[Path, ...] = ()  # outputs of other commands that this one reads
    serves: Path | None = None  # folder of the model that has to be served meanwhile

    @classmethod
    def writing(cls, out: Path, *arguments: str, needs: tuple[Path, ...] = (), serves: Path | None = None) -> Stage:
        """Return a command with `--out` at its end."""
        return cls((*arguments, "--out", str(out)), out, needs, serves)

    @property
    def line(self) -> str:
        return shlex.join(["reasonrag", *self.arguments])


class Plan:
    """A list of commands bound to a folder; `plan.json` there lists the finished ones, and what each has cost.

    A command is done if it ended with exit code 0: one that failed may have written a summary too. `cpu_s` has the CPU
    seconds of a command by its line, killed attempts included.
    """

    def __init__(self, out: Path, stages: Sequence[Stage], serve: str | None = None) -> None:
        """Bind a folder to all commands, which may extend the plan that the folder holds already.

        `serve` is the command that serves a model at `ADDRESS`.
        """
        self.stages = stages
        self._serve = serve
        self.out = out
        self._file = out / "plan.json"
        self._folder = Folder(out, "plan", self._file.name)
        self._folder.claim()
        lines = {stage.line for stage in stages}
        before = require_json(self._file, "choose a new folder for --out") if self._file.exists() else {}
        others = [line for line in before.get("plan", ()) if line not in lines]
        if others:
            raise RunError(
                f"{out} holds another plan, with {others[0]!r}; repeat the command that made it, or choose a new "
                "folder for --out"
            )
        self._done = set(before.get("done", ()))
        self.cpu_s: dict[str, float] = before.get("cpu_s", {})
        self._write()

    def is_done(self, stage: Stage) -> bool:
        """Return whether the command has succeeded, now or in an earlier run."""
        return stage.line in self._done

    def run(self, show: Callable[[str], None], *, only: Collection[Path] | None = None) -> int:
        """Run the commands that are not done yet. A command that fails ends only the commands that need its output.

        Args:
            show: prints a line; every command is shown before it runs.
            only: outputs of the commands to run; None runs all.

        Returns:
            0, or the exit code of the first command that failed. A command that was stopped by a signal ends all.
        """
        exit_code = 0
        done = {stage.out for stage in self.stages if self.is_done(stage)}
        planned = {stage.out for stage in self.stages}
        with self._folder.locked():
            for number, stage in enumerate(self.stages, 1):
                mark = f"[{number}/{len(self.stages)}]"
                missing = [path for path in stage.needs if path in planned and path not in done]
                if only is not None and stage.out not in only:
                    continue
                if self.is_done(stage):
                    show(f"{mark} done before: {stage.line}")
                elif missing:
                    show(f"{mark} left out, because {missing[0]} is missing: {stage.line}")
                else:
                    code = self._run(stage, show, mark)
                    if not code:
                        done.add(stage.out)
                        self.done(stage)
                        continue
                    show(f"{mark} ended with exit code {code}: {stage.line}")
                    exit_code = exit_code or code
                    if code >= 128:
                        show("stopped; the same command resumes")
                        return code
        return exit_code

    def _run(self, stage: Stage, show: Callable[[str], None], mark: str) -> int:
        """Show and run a command, return its exit code; SIGTERM is passed on, Ctrl-C reaches it by the terminal."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        children: list[subprocess.Popen[bytes]] = []
        is_stopped = False

        def stop(number: int, frame: object) -> None:
            nonlocal is_stopped
            is_stopped = True
            for child in children if number == signal.SIGTERM else ():
                child.terminate()

        handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            show(f"{mark} $ {stage.line}")  # a signal from here on is passed on
            with self._served(stage.serves):
                children.append(subprocess.Popen([sys.executable, "-m", "reasonrag", *stage.arguments]))
                if is_stopped:  # while the command was being started
                    children[0].terminate()
                code = children[0].wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.cpu_s[stage.line] = round(self.cpu_s.get(stage.line, 0.0) + cpu_s, 3)
        self._write()
        return 128 - code if code < 0 else code

    def _served(self, model: Path | None) -> AbstractContextManager[None]:
        if model is None or self._serve is None:
            return nullcontext()
        return serving(self._serve, ADDRESS, str(model), self.out)

    def done(self, stage: Stage) -> None:
        self._done.add(stage.line)
        self._write()

    def _write(self) -> None:
        lines = [stage.line for stage in self.stages]
        write_json(self._file, {"plan": lines, "done": sorted(self._done), "cpu_s": self.cpu_s}, indent=1)
