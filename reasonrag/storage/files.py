"""Files and folders on disk: written whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reasonrag.core.errors import RunError
from reasonrag.core.text import parse_json

if TYPE_CHECKING:
    from reasonrag.core.plots import BarChart, Panel

RUNS = Path("runs")  # in the working folder: where commands without --out write, and look for what came before


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when the block ends, with all its bytes on disk; if the block raises, never.

    Every file of ours is written this way, except files that grow (a journal, a log of calls).

    Raises:
        OSError: the disk is full, ...; `filename` is that of `path`.
    """
    # In the same folder, as a rename is one step within a
    # file system only; hidden, so that no pattern finds it.
    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp")
    if path.is_char_device() or path.is_block_device() or path.is_fifo():  # a file would take its place
        raise OSError(errno.EINVAL, "it is a device or a pipe", str(path))
    try:
        temporary.unlink(missing_ok=True)
        with naming(path), temporary.open("xb") as file:
            yield file
            file.flush()
            # Without it, a power cut may leave the new name with no bytes behind it.
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in the errors of a block that name none: those of writing to an open file do not, on a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def place(source: Path, target: Path) -> Path:
    """Link a file if the file system can, else copy it; return the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another file system, or one without links
        # A link to a link would end where that is moved, so the file itself is linked.
        os.link(source.resolve(), target)
        return target
    with source.open("rb") as original, writing(target) as file:
        shutil.copyfileobj(original, file, 1 << 20)
    return target


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with writing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file, whole or not at all; raise ValueError for NaN and infinities, which JSON has no word for."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def save_charts(stem: Path, charts: Sequence[Panel | BarChart]) -> list[Path]:
    """Write charts side by side as `stem.svg` and `stem.png`; return both paths. ValueError: as `plots.images`."""
    from reasonrag.core.plots import images

    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn = {stem.with_name(f"{stem.name}.{kind}"): image for kind, image in images(charts).items()}
    for path, image in drawn.items():
        with writing(path) as file:
            file.write(image)
    return list(drawn)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing, damaged, or holds anything but an object."""
    try:
        document = parse_json(path.read_bytes()) if path.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def require_json(path: Path, advice: str = "the command that wrote it can write it again") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        RunError: the file is missing, damaged, or holds anything
            but an object. The message ends with `advice`.
    """
    if (document := read_json(path)) is None:
        raise RunError(f"{path} cannot be read: it is missing or damaged; {advice}")
    return document


@contextlib.contextmanager
def lock(path: Path, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs.

    The lock belongs to the open file and not to its name, so the kernel releases it however the process
    ends: no lock is ever stale. The file names its owner, for the error message of others. NFS knows such
    locks (flock) from one machine to another, unless it is mounted with `nolock` or `local_lock`: then
    each machine sees its own alone.

    Args:
        path: the lock file, created if it is missing.
        waiting: called before waiting for another process; if None, do not wait.

    Raises:
        RunError: another process holds the lock, and `waiting`
            is None; or the file or its disk cannot be locked.
    """
    with os.fdopen(open_lock(path), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if waiting is None:
                owner = file.read(200).decode(errors="replace").strip() or "unknown"
                message = f"{path.parent} is in use by another process ({owner}); wait for it or stop it"
                raise RunError(message) from error
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise RunError(f"{path} cannot be locked ({error.strerror}); choose a folder on a local disk") from error
        # For the message of a process that finds the lock held. On a full disk it names no owner.
        file.truncate(0)
        with contextlib.suppress(OSError):
            file.write(f"pid {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            file.truncate(0)  # the folder may be given to others, and should not name this machine


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keep other processes from writing in a run's folder while the block reads it.

    Raises:
        RunError: another process writes in it.
    """
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # a folder that was copied without it
        yield
        return
    with os.fdopen(handle, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process writes in {folder}; wait for it or stop it") from None
        yield


def open_lock(path: Path) -> int:
    """Open a lock file, created if it is missing; raise RunError if it is a link, or anything but a file."""
    # O_NOFOLLOW: a lock file that leads elsewhere would have
    # its target emptied. O_NONBLOCK: a pipe would wait.
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a symbolic link, a folder, a socket
            raise
    else:
        status = os.fstat(handle)
        # A second name may stand anywhere, and its file is of someone else.
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return handle
        os.close(handle)
    raise RunError(f"{path} is a link, a folder or a device, where a lock file should be; delete it")


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems without it: SMB, FUSE
            raise
    finally:
        os.close(handle)


def size_and_digest(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Return the size of a file in bytes, and its SHA-256 as 64 hex digits; with `sync`, once it is on disk."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, files: Iterable[Path], *, sync: bool = False) -> dict[str, list[int | str]]:
    """Return size and SHA-256 of files by their path in a folder; with `sync`, once they are on disk."""
    return {file.relative_to(folder).as_posix(): list(size_and_digest(file, sync=sync)) for file in sorted(files)}


def damage(folder: Path, files: Mapping[str, Sequence[Any]], *, fully: bool = True) -> str:
    """Name a file that differs from its entry in `digests`, and how; "" if none does. Only sizes unless `fully`.

    >>> damage(Path("no/such"), {"file": [3, "abc"]})
    'file is missing'
    """
    for name, (size, digest) in files.items():
        try:
            if (actual_size := (folder / name).stat().st_size) != size:
                return f"{name} has {actual_size} bytes, not {size}"
            if fully and digest and size_and_digest(folder / name)[1] != digest:
                return f"{name} is damaged: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def short_hash(value: Any) -> str:
    """Return 16 hex digits of a hash over a JSON value, for fingerprints."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
