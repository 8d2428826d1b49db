"""`publish`: a run's data or a trained policy to the HF Hub."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from reasonrag.commands.shell import error_console
from reasonrag.errors import ConfigError, RunError
from reasonrag.publish.hub import CARD
from reasonrag.publish.publish import Wanted, beside, check, stage, upload
from reasonrag.publish.scan import Finding
from reasonrag.text import printable

_SHOWN = 20


def publish(path: Path, wanted: Wanted) -> None:
    """Stage beside the run, search, upload, and say where it is."""
    check(path, wanted)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the staged folder goes then, too
    console = error_console()
    with beside(path) as folder:
        staged = stage(path, folder, wanted)
        _say_found(staged.findings)
        done = upload(staged, wanted, say=lambda line: console.print(printable(line)))
    seen = "private" if done.private else "public"
    print(printable(f"{done.url}, {done.tag}, {seen}" + ("" if done.changed else "; it was there already")))


def dry_run(path: Path, wanted: Wanted, out: Path | None) -> None:
    """Write what would go up, and say what it is; nothing is sent."""
    if out is None:
        raise ConfigError("--dry-run writes what would go up; say where with --out, a new folder")
    check(path, wanted)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise RunError(f"{out} is not empty; choose a new folder for --out")
    with beside(out) as folder:
        staged = stage(path, folder, wanted)
        files = staged.files
        for made in folder.iterdir():
            made.replace(out / made.name)
    for name, size in files.items():
        print(printable(f"{size:>14,}  {name}"))
    print(printable(f"card: {out / CARD} (what others wrote into the one on the Hub is kept)"))
    print(printable(f"licence: {staged.licence}"))
    _say_found(staged.findings)
    if not staged.findings:
        print("search: no secrets, machine paths or e-mail addresses")
    staged.check(wanted.allow)


def _say_found(findings: list[Finding]) -> None:
    for finding in findings[:_SHOWN]:
        print(printable(f"found: {finding}"))
    if len(findings) > _SHOWN:
        print(f"found: {len(findings) - _SHOWN:,} more")
