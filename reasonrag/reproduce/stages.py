"""A comparison as a list of `reasonrag` commands, each in a process of its own and done once."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.errors import RunError
from reasonrag.runs import claim_folder, write_text


@dataclass(frozen=True, slots=True)
class Stage:
    """One command, and the folder that it writes."""

    arguments: tuple[str, ...]
    out: Path

    @property
    def line(self) -> str:
        """As typed."""
        return shlex.join(["reasonrag", *self.arguments])


class Plan:
    """A list of commands bound to a folder, which keeps what is done in `plan.json`.

    A command is done once it has ended with exit code 0: one that failed may have left a summary all the same.
    """

    def __init__(self, out: Path, stages: Sequence[Stage]) -> None:
        """Make a folder that of this plan.

        Raises:
            RunError: another plan's results are in it, or other files.
        """
        self.stages = stages
        self._file = out / "plan.json"
        claim_folder(out, "plan", holds=self._file.exists())
        before = self._read()
        lines = [stage.line for stage in stages]
        if before is not None and before["plan"] != lines:
            pairs = zip(before["plan"], lines, strict=False)
            told = next((f"{old!r} there, {new!r} now" for old, new in pairs if old != new), "of another length")
            raise RunError(f"{out} holds another plan ({told}); go back to that, or choose a new folder for --out")
        self._done = set(before["done"] if before else ())
        self._write()

    def run(self, say: Callable[[str], None]) -> int:
        """Run what is not done yet, one after the other; each command is said before it runs.

        Returns:
            0, or the exit code of the first command that failed or was stopped.
        """
        for number, stage in enumerate(self.stages, 1):
            mark = f"[{number}/{len(self.stages)}]"
            if stage.line in self._done:
                say(f"{mark} done before: {stage.line}")
                continue
            say(f"{mark} $ {stage.line}")
            if code := _run(stage.arguments):
                return code
            self._done.add(stage.line)
            self._write()
        return 0

    def _read(self) -> dict[str, list[str]] | None:
        if not self._file.exists():
            return None
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {name: [str(line) for line in found[name]] for name in ("plan", "done")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self._file} cannot be read ({error}); choose a new folder for --out") from error

    def _write(self) -> None:
        lines = [stage.line for stage in self.stages]
        known = {"plan": lines, "done": [line for line in lines if line in self._done]}
        write_text(self._file, json.dumps(known, indent=1) + "\n")


def _run(arguments: Sequence[str]) -> int:
    """The command in a process of its own. It drains on Ctrl-C by itself; a SIGTERM is handed on."""
    child = subprocess.Popen([sys.executable, "-m", "reasonrag", *arguments])
    # A terminal sends Ctrl-C to both processes: this one only waits.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: os.kill(child.pid, signal.SIGTERM)),
    }
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code
