"""A disk that gets full: a child process has a tmpfs of a few kilobytes over a folder, and its files stay when it ends.

The tmpfs is in a mount namespace of the child, so nothing is left of it, however the child ends. Whoever may not mount
gets one in a user namespace of its own. Where a machine forbids that too, these tests cannot run: a limit on the size
of files (`RLIMIT_FSIZE`) is none on their sum, and the largest file of a run is the one that is made first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import warmed
from tests.e2e import product

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
AMPLE_KB = 1 << 16
_LOOK_S = 0.0001  # much less than a file takes to be written and synced
_NO_DISK = 77  # an exit code that is none of the commands'


def run(
    folder: Path, kb: int, *arguments: str | Path, log: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `reasonrag` while a disk of so many kB is mounted at a folder, with what the folder holds.

    What the command left on that disk is then in the folder, and the disk is no longer full. stderr goes to the file
    `log` of the folder, if that is given. The last line of stdout is what `peak_kb` returns.
    """
    done = warmed.ended(start(folder, kb, *arguments, log=log, **environment), 120)
    if done.returncode == _NO_DISK:
        pytest.skip("this machine lets nobody but root mount a disk, not even in a user namespace")
    return done


def start(folder: Path, kb: int, *arguments: str | Path, log: str = "", **environment: str) -> warmed.Child:
    """Start what `run` runs; SIGTERM is passed on."""
    folder.mkdir(parents=True, exist_ok=True)
    return warmed.Child(_mounted, (folder, kb, log, *map(str, arguments)), product.environment(**environment))


def peak_kb(folder: Path, *arguments: str | Path, **environment: str) -> int:
    """Run `reasonrag` on a disk with room, as `run` does; return the kB of it that were in use at most.

    Temporary files count while they are there, and a little more may have been in use between two looks.
    """
    done = run(folder, AMPLE_KB, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def _mounted(folder: Path, kb: int, log: str, *arguments: str) -> None:
    below = os.open(folder, os.O_RDONLY)
    before = Path(f"/proc/self/fd/{below}")
    if not _mount(folder, kb):
        os._exit(_NO_DISK)
    shutil.copytree(before, folder, dirs_exist_ok=True)
    child = os.fork()
    if child == 0:
        if log:
            os.dup2(os.open(folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        return warmed.reasonrag(*arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    ended, status, peak = 0, 0, 0
    while not ended:
        time.sleep(_LOOK_S)
        disk = os.statvfs(folder)
        peak = max(peak, (disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024)
        ended, status = os.waitpid(child, os.WNOHANG)
    print(peak, flush=True)
    for entry in before.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(folder, before, dirs_exist_ok=True)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _mount(folder: Path, kb: int) -> bool:
    """Mount a tmpfs at a folder, for this process and its children; return False if that is forbidden."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS):  # root in a container may be allowed no more than others
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            try:
                Path("/proc/self", name).write_text(text)
            except OSError:  # as where AppArmor has a say
                return False
    private = libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    return private == 0 and libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=%dk" % kb) == 0
