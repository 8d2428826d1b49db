"""Run benchmarks one after another, keep their figures and write `docs/results/performance.md`.

    python -m benchmarks              # the quick ones: `make bench`
    python -m benchmarks NAME ...     # others
    python -m benchmarks NAME --opt   # one, with options of its own
    python -m benchmarks NAME.OTHER --opt   # the same, kept beside the figures of NAME

One that fails is reported, keeps its figures of before, and the others go on; the exit code is then 1. A figure that
misses its limit is no failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.table import ROOT, lines
from docs.reference.performance import FIGURES, QUICK, performance_page
from reasonrag.storage.files import write_json, write_text

TIMEOUT_S = 300  # of a quick one, which takes far less unless other work has the machine


def run(name: str, arguments: list[str], timeout_s: float | None) -> dict[str, Any]:
    """Return the object that a benchmark printed; raise SubprocessError or ValueError if there is none."""
    command = [sys.executable, "-m", f"benchmarks.{_module(name)}", "--json", *arguments]
    # Started in a session of its own, so that the servers it started end with it.
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = child.communicate(timeout=timeout_s)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        result: dict[str, Any] = json.loads(printed)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    # A path says where somebody's environment lies, which belongs on no page.
    shown = [Path(argument).name if argument.startswith(("/", "~")) else argument for argument in arguments]
    return result | ({"options": " ".join(shown)} if shown else {})


def _module(name: str) -> str:
    return name.partition(".")[0]


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if len(names) == len(sys.argv) - 1:
        arguments, timeout_s = [], None if names else TIMEOUT_S
    else:  # options belong to the one benchmark that is named first
        names, arguments, timeout_s = names[:1], sys.argv[2:], None
    asked = names or len(sys.argv) == 1
    if not asked or not all((ROOT / "benchmarks" / f"{_module(name)}.py").exists() for name in names):
        sys.exit(__doc__)
    FIGURES.mkdir(parents=True, exist_ok=True)
    started, failures = time.monotonic(), []
    for name in names or QUICK:
        try:
            result = run(name, arguments, timeout_s)
        except (subprocess.SubprocessError, ValueError) as error:
            failures.append(name)
            print(f"{name}: FAILED, {error}\n", flush=True)
            continue
        write_json(FIGURES / f"{name}.json", result, indent=1)
        write_text(ROOT / "docs" / "results" / "performance.md", performance_page())
        print("\n".join([f"{name}: {lines(result)[0]}", *lines(result)[1:], ""]), flush=True)
    print(f"{time.monotonic() - started:.0f} s in all; docs/results/performance.md is written")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
