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
from reasonrag.runs import write_text


@dataclass(frozen=True, slots=True)
class Stage:
    """One command; it is done once the file that it writes last is there."""

    arguments: tuple[str, ...]
    makes: Path

    @property
    def line(self) -> str:
        """As typed."""
        return shlex.join(["reasonrag", *self.arguments])


def bind_plan(out: Path, stages: Sequence[Stage]) -> None:
    """Make a folder that of this plan.

    Raises:
        RunError: another plan's results are in it.
    """
    file = out / "plan.json"
    lines = [stage.line for stage in stages]
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        changed = [(old, new) for old, new in zip(before, lines, strict=False) if old != new]
        if changed or len(before) != len(lines):
            told = f"{changed[0][0]!r} there, {changed[0][1]!r} now" if changed else f"{len(before)} stages there"
            raise RunError(f"{out} holds another plan ({told}); go back to that, or choose a new folder for --out")
        return
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} holds other files; choose a new folder for --out")
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(lines, indent=1) + "\n")


def run_stages(stages: Sequence[Stage], say: Callable[[str], None]) -> int:
    """Run what is not done yet, one after the other; each command is said before it runs.

    Returns:
        0, or the exit code of the first command that failed or was stopped.
    """
    for number, stage in enumerate(stages, 1):
        mark = f"[{number}/{len(stages)}]"
        if stage.makes.exists():
            say(f"{mark} done before: {stage.line}")
            continue
        say(f"{mark} $ {stage.line}")
        if code := _run(stage.arguments):
            return code
    return 0


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
