"""Checkpoints that survive a kill: one counts once its marker is written, and older ones go only after that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.storage.files import write_json

_MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


# What safetensors and torch say of a full disk: neither raises an OSError.
_FULL = ("No space left on device", "file write failed", "Disk quota exceeded")


@contextlib.contextmanager
def room_on_disk(out: Path) -> Iterator[None]:
    """Say in one line that a training ran out of disk.

    Raises:
        RunError: a file could not be written; whole checkpoints are kept.
    """
    try:
        yield
    except Exception as error:
        if not any(told in str(error) for told in _FULL):
            raise
        raise RunError(
            f"{out}: the disk is full; free some space and run the same command again, it goes on from the last whole "
            "checkpoint"
        ) from error


def checkpoints_folder(out: Path) -> Path:
    """Where the checkpoints of a training are."""
    return out / "checkpoints"


def last_checkpoint(out: Path) -> Path | None:
    """The latest checkpoint that was written to its end; None without one.

    A checkpoint whose writing was cut off has no marker, and one that lost data since (a full disk, a power cut) has
    files of other sizes than the marker says: both are ignored.
    """
    found = [folder for folder in _checkpoints(out) if _is_whole(folder)]
    return found[-1] if found else None


def mark_complete(checkpoint: Path, **facts: Any) -> None:
    """Say that a checkpoint is whole.

    Args:
        checkpoint: its folder.
        facts: what else to keep there, see `checkpoint_facts`.
    """
    files = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    write_json(checkpoint / _MARKER, {**facts, "files": files}, indent=1)


def checkpoint_facts(checkpoint: Path) -> dict[str, Any]:
    """What `mark_complete` kept."""
    facts: dict[str, Any] = json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))
    return facts


def remove_old(out: Path, *, keep: int, best: str | None = None) -> None:
    """Remove all but the latest whole checkpoints, and those that are not whole.

    Args:
        out: the training's folder.
        keep: how many to keep.
        best: the folder of a checkpoint to keep besides them.
    """
    whole = [folder for folder in _checkpoints(out) if _is_whole(folder)]
    kept = set(whole[-keep:]) | {folder for folder in whole if best and folder.name == Path(best).name}
    for folder in _checkpoints(out):
        if folder not in kept:
            (folder / _MARKER).unlink(missing_ok=True)  # first: what is half removed must not count
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(out: Path) -> list[Path]:
    """By step."""
    folder = checkpoints_folder(out)
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def _is_whole(checkpoint: Path) -> bool:
    try:
        files: dict[str, int] = checkpoint_facts(checkpoint)["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _files(folder: Path) -> list[Path]:
    return [
        Path(root) / name for root, _, names in os.walk(folder) for name in names if name != _MARKER and name[0] != "."
    ]
