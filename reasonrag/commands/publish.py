"""`publish`: a run's data or a trained policy to the HF Hub."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from reasonrag.commands.shell import error_console, this_command
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.text import printable
from reasonrag.publish.hub import CARD, push
from reasonrag.publish.publish import PublishOptions, check, stage, staging_folder
from reasonrag.publish.scan import Finding

_SHOWN = 20


def publish(path: Path, options: PublishOptions) -> None:
    """Stage beside the run, search, upload, and say where it is."""
    check(path, options)
    _heed_signals()
    console = error_console()
    with staging_folder(path) as folder:
        staged = stage(path, folder, options)
        _say_found(staged.findings)
        staged.check(options.allow)
        try:
            done = push(staged.upload, say=lambda line: console.print(printable(line)))
        except SystemExit:
            console.print(f"stopped; what the Hub has is not sent again. Go on with:\n  {this_command()}")
            raise
    seen = "private" if done.private else "public"
    print(printable(f"{done.url}, {done.tag}, {seen}" + ("" if done.changed else "; it was there already")))


def dry_run(path: Path, options: PublishOptions, out: Path | None) -> None:
    """Write what would go up, and say what it is; nothing is sent."""
    if out is None:
        raise ConfigError("--dry-run writes what would go up; say where with --out, a new folder")
    check(path, options)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise RunError(f"{out} is not empty; choose a new folder for --out")
    _heed_signals()
    with tempfile.TemporaryDirectory(dir=out) as folder:
        staged = stage(path, Path(folder), options)
        files = staged.files
        for name in files:  # copied: staged files may be links, and whoever edits these must not edit the run
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder, name), out / name)
    for name, size in files.items():
        print(printable(f"{size:>14,}  {name}"))
    print(printable(f"card: {out / CARD} (what others wrote into the one on the Hub is kept)"))
    print(printable(f"licence: {staged.licence}"))
    _say_found(staged.findings)
    if not staged.findings:
        print("search: no secrets, machine paths or e-mail addresses")
    staged.check(options.allow)


def _heed_signals() -> None:
    """From now on Ctrl-C and SIGTERM end the command after staged files are gone; a second one ends it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    signal.signal(number, lambda number, frame: os._exit(128 + number))  # a file that goes up would be waited for
    sys.exit(128 + number)


def _say_found(findings: list[Finding]) -> None:
    for finding in findings[:_SHOWN]:
        print(printable(f"found: {finding}"))
    if len(findings) > _SHOWN:
        print(f"found: {len(findings) - _SHOWN:,} more")
