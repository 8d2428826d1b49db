from __future__ import annotations

import os
import posix
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reasonrag.core.errors import RunError
from reasonrag.storage.files import (
    fsync_folder,
    lock,
    read_json,
    reading,
    require_json,
    write_json,
    write_text,
    writing,
)
from reasonrag.storage.folder import Folder
from tests.faults.matrix import Figure


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_text(path, "before\n")
    with pytest.raises(ZeroDivisionError), writing(path) as file:
        file.write(b"half of")
        raise ZeroDivisionError
    assert path.read_text() == "before\n" and [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a device or a pipe"):  # which a file would take the place of
        write_text(tmp_path / "pipe", "text")


def test_bytes_are_on_disk_before_the_name_is_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "notes.txt", []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((os.fstat(handle).st_size, path.exists())))
    write_text(path, "after\n")
    (size, named), (_, folder_named) = synced
    assert size == len("after\n") and not named and folder_named


def test_json_comes_back_as_it_was_and_holds_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"name": "Bücher\u2028", "counts": [1, None]})
    assert read_json(path) == {"name": "Bücher\u2028", "counts": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"mean": float("nan")})
    assert read_json(path) is not None


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_none_or_an_error_with_advice(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert read_json(path) is None
    with pytest.raises(RunError, match=r"run\.json cannot be read.*; build it again"):
        require_json(path, "build it again")


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    with pytest.raises(RunError, match="holds other files and no run; choose a new folder"):
        Folder(tmp_path, "run").claim()
    Folder(tmp_path, "run", ignore=("cat.png",)).claim()
    Folder(tmp_path, "run", "*.png").claim()
    with pytest.raises(RunError, match="cannot hold a run"):
        Folder(tmp_path / "cat.png" / "run", "run").claim()
    with pytest.raises(RunError, match="its path is not UTF-8"):
        Folder(tmp_path / "caf\udce9" / "run", "run").claim()


HOLDER = """
import sys, time
from pathlib import Path
from reasonrag.storage.files import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_is_read_is_not_written_and_readers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with reading(tmp_path), lock(tmp_path / ".lock"), pytest.raises(RunError, match="another process writes in"):
        reading(tmp_path).__enter__()
    with reading(tmp_path), reading(tmp_path), pytest.raises(RunError, match="in use by another process"):
        lock(tmp_path / ".lock").__enter__()


@pytest.mark.fault(
    "10", "a lock whose process was killed", "others are told who has it; it is free at once when that is dead"
)
def test_a_lock_names_its_owner_and_dies_with_it(tmp_path: Path, figure: Figure) -> None:
    path = tmp_path / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline() == b"held\n"
    with pytest.raises(RunError, match=rf"in use by another process \(pid {holder.pid} on .*\); wait for it"):
        lock(path).__enter__()
    waited: list[int] = []

    def kill() -> None:
        waited.append(holder.pid)
        os.kill(holder.pid, signal.SIGKILL)

    with lock(path, waiting=kill):
        assert f"pid {os.getpid()} on" in path.read_text()
    figure(f"{len(waited)} lock of a dead process taken over")
    assert waited == [holder.pid] and path.read_text() == ""
    holder.wait()


@pytest.mark.fault(
    "A7",
    "`.lock` is a link, a pipe, a folder or a device",
    "refused; what it leads to is untouched",
    before="the file behind a link: emptied and written",
)
def test_what_is_no_lock_file_is_left_alone(tmp_path: Path, figure: Figure) -> None:
    victim, missing, path = tmp_path / "victim.txt", tmp_path / "missing", tmp_path / ".lock"
    victim.write_text("mine")
    kinds: dict[str, Callable[[], object]] = {
        "symbolic link": lambda: path.symlink_to(victim),
        "link to nothing": lambda: path.symlink_to(missing),
        "link to a device": lambda: path.symlink_to("/dev/null"),
        "hard link": lambda: path.hardlink_to(victim),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    for make in kinds.values():
        make()
        with pytest.raises(RunError, match=r"\.lock is a link, a folder or a device"):
            lock(path).__enter__()
        with pytest.raises(RunError, match=r"\.lock is a link, a folder or a device"):
            Folder(tmp_path, "run", "*").claim()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    figure(f"{', '.join(kinds)}: refused; the file behind it {'whole' if victim.read_text() == 'mine' else 'HARMED'}")
    assert victim.read_text() == "mine" and not missing.exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that refuses to sync folders")
def test_a_file_system_that_cannot_sync_folders_holds_files_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", posix.fsync)  # tests sync nothing
    fsync_folder(Path("/proc/self"))  # as SMB and many FUSE disks: "Invalid argument"
