"""A full disk, while each command writes: one line that names the file and what to do, and nothing is lost.

Sizes are spread over what a command writes, so that the disk gets full at another moment each time: on a disk of that
size the command fails, and with room again the same command ends as if nothing had happened.

The disk is a tmpfs in a mount namespace of a child process, so nothing is left of it, however the child ends, and its
files stay. Whoever may not mount gets one in a user namespace of its own. Where a machine forbids that too, these tests
cannot run: `RLIMIT_FSIZE` limits one file, not their sum, and a run makes its largest file first.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import warmed
from tests.e2e import product
from tests.faults.commands import IN_FLIGHT, Commands
from tests.faults.matrix import Figure, Rounds

pytestmark = pytest.mark.slow

ROOM_KB = 100  # what a journal takes up before the first call
SIZES = {  # the smallest disk in kB, on which the first file has room; tries in the suite, and at full size
    "build-tree": (ROOM_KB, 2, 18),
    "eval": (ROOM_KB, 0, 10),
    "index build": (4, 1, 8),
    "dpo train": (8, 0, 6),
    "rl train": (8, 0, 8),
    "report": (4, 0, 6),
}


_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
AMPLE_KB = 1 << 16
_LOOK_S = 0.0001  # much less than a file takes to be written and synced
_NO_DISK = 77  # an exit code that is none of the commands'


def on_disk(folder: Path, kb: int, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `reasonrag` while a disk of so many kB is mounted at a folder, with what the folder holds.

    What the command left on that disk is then in the folder, and the disk is no longer full.
    The last line of stdout is what `peak_kb` returns.
    """
    done = warmed.ended(start(folder, kb, *arguments, **environment), 120)
    if done.returncode == _NO_DISK:
        pytest.skip("this machine lets nobody but root mount a disk, not even in a user namespace")
    return done


def start(folder: Path, kb: int, *arguments: str | Path, **environment: str) -> warmed.Child:
    """Start what `on_disk` runs; SIGTERM is passed on."""
    folder.mkdir(parents=True, exist_ok=True)
    return warmed.Child(_mounted, (folder, kb, *map(str, arguments)), product.environment(**environment))


def peak_kb(folder: Path, *arguments: str | Path, **environment: str) -> int:
    """Run `reasonrag` on a disk with room, as `on_disk` does; return the kB of it that were in use at most.

    Temporary files count while they are there, and a little more may have been in use between two looks.
    """
    done = on_disk(folder, AMPLE_KB, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def _mounted(folder: Path, kb: int, *arguments: str) -> None:
    below = os.open(folder, os.O_RDONLY)
    before = Path(f"/proc/self/fd/{below}")
    if not _mount(folder, kb):
        os._exit(_NO_DISK)
    shutil.copytree(before, folder, dirs_exist_ok=True)
    child = os.fork()
    if child == 0:
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


def assert_one_line(done: subprocess.CompletedProcess[str], out: Path) -> None:
    """Assert that a command ended with one line that names a file and says that it could not be written, or why."""
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(out) in line and "damaged" not in line
    assert any(reason in line for reason in ("No space left", "is full", "disk I/O error"))


@pytest.mark.fault(
    "6",
    "the disk gets full at another moment each time",
    "one line, exit code 2; then resumed: only calls in flight are repeated",
)
@pytest.mark.fault(
    "A4",
    "a full disk under the journal and all other files",
    "one line that names file and reason; nothing is called damaged",
    before="a traceback (journal), or 'damaged ... restore it'",
)
def test_a_disk_that_gets_full(commands: Commands, rounds: Rounds, figure: Figure) -> None:
    draw, twice, full = random.Random(6), 0, 0
    for name, (least, few, many) in SIZES.items():
        command, tries = commands[name], rounds(few, many)
        if not tries:
            continue
        out = command.new()
        needed = peak_kb(out, *command.arguments(out), **command.environment)
        differing, enough = [], 0
        for number in range(tries):
            kb = round(least + (needed - least) * (number + draw.random()) / tries)
            while True:
                out = command.new()
                done = on_disk(out, kb, *command.arguments(out), **command.environment)
                if done.returncode:
                    break
                enough += 1  # its -wal file came out smaller, as commits took more calls at a time
                kb -= (needed - least) // 20 + 1
                assert kb >= least, "nothing that is written is on this disk"
            assert_one_line(done, out)
            differing += [(kb, *names) for names in [command.differing(out)] if names]
            if command.server:
                twice += command.server.paid_twice
                full += 1
        figure(
            f"{name}, which needs {needed:,} kB: {tries} of {tries} disks got full ({enough} others were large "
            f"enough); {tries - len(differing)} of {tries} gave the same result"
        )
        assert not differing
    figure(f"{twice} calls repeated after {full} full disks, {IN_FLIGHT} in flight at each")
    assert twice <= full * IN_FLIGHT
