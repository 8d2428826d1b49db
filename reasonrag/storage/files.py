"""Files and folders on disk: written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from reasonrag.core.errors import RunError

# File systems of one machine's disks, as Linux names them. All others may be shared by machines.
_LOCAL = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"])

RUNS = Path("runs")  # in the working folder: where commands without --out write, and look for what came before


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when the block ends, with all its bytes on disk; if the block raises, never."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with writing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file, whole or not at all; raise ValueError for NaN and infinities, which JSON has no word for."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing, damaged, or holds anything but an object."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def require_json(path: Path, advice: str = "the command that wrote it can write it again") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        RunError: the file is missing, damaged, or holds anything but an object. The message ends with `advice`.
    """
    document = read_json(path)
    if document is None:
        raise RunError(f"{path} cannot be read: it is missing or damaged; {advice}")
    return document


def claim_folder(path: Path, what: str, *, already_ours: bool, ignore: Collection[str] = ()) -> None:
    """Create a folder, or check that `what` may be written into it.

    Args:
        path: the folder.
        what: what will be written, for the error message: a run, a report, ...
        already_ours: whether the folder holds `what` already, so that its other files do not matter.
        ignore: names of files that an interrupted start of `what` may have left.

    Raises:
        RunError: the folder holds other files, or cannot be written.
    """
    try:
        if path.exists() and not already_ours and not is_empty(path, ignore=ignore):
            raise RunError(f"{path} holds other files and no {what}; choose a new folder for --out")
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise RunError(f"{path} cannot hold a {what} ({error.strerror}); choose another one for --out") from error


def is_empty(folder: Path, *, ignore: Collection[str] = ()) -> bool:
    """Return whether a folder holds nothing but a lock file and the names in `ignore`."""
    return all(entry.name in (".lock", *ignore) for entry in folder.iterdir())


def unnamed_folder(name: str, holds_same: Callable[[Path], bool], *, ignore: Collection[str] = ()) -> Path:
    """Return where a command writes that was given no `--out`: the first usable one of runs/NAME, runs/NAME-2, ...

    Usable is a folder that does not exist, that is empty (`ignore` as for `claim_folder`), or for which `holds_same`
    returns True: so the same command resumes its run, and another configuration gets a folder of its own.
    """
    name = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:80] or "run"
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        if not folder.exists() or is_empty(folder, ignore=ignore) or holds_same(folder):
            return folder
    raise AssertionError("numbers end")


@contextlib.contextmanager
def lock(path: Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs.

    The lock belongs to the open file and not to its name, so the kernel releases it however the process ends: no lock
    is ever stale. The file names its owner, for the error message of others.

    Args:
        path: the lock file, created if it is missing.
        waiting: called before waiting for another process; if None, do not wait.

    Raises:
        RunError: another process holds the lock, and `waiting` is None.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if waiting is None:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise RunError(
                    f"{path.parent} is in use by another process ({owner}); wait for it or stop it"
                ) from error
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # the folder may be given to others, and should not name this machine


def is_shared(path: Path) -> bool:
    """Return whether other machines may see this path: whether Linux says that its disk is no local one."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    except OSError:  # no Linux
        return False
    kinds = {place.encode().decode("unicode_escape"): kind for _, place, kind, *_ in mounts}  # "\\040" is a blank
    path = path.resolve()
    mounted = next((kinds[str(folder)] for folder in (path, *path.parents) if str(folder) in kinds), None)
    return mounted not in _LOCAL


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def short_hash(value: Any) -> str:
    """Return 16 hex digits of a hash over a JSON value, for fingerprints."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
