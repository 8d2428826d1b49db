"""A full disk, while each command writes: one line that names the file and what to do, and nothing is lost.

Sizes are spread over what a command writes, so that the disk gets full at another moment each time: on a disk of that
size (`tests/faults/disks.py`) the command fails, and with room again the same command ends as if nothing had happened.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from reasonrag.storage.journal import _ROOM
from tests.e2e import product
from tests.faults import disks
from tests.faults.commands import Commands, digests
from tests.faults.matrix import Figure, Rounds

pytestmark = pytest.mark.slow

ROOM_KB = _ROOM // 1024  # what a journal takes up before the first call
SIZES = {  # in kB, from the first file to the last one; tries in the suite, and at full size
    "build-tree": (ROOM_KB + 100, ROOM_KB + 1_400, 2, 18),
    "eval": (ROOM_KB + 100, ROOM_KB + 450, 0, 10),
    "index build": (4, 110, 1, 8),
    "dpo train": (8, 4_000, 0, 6),
}


def assert_one_line(done: subprocess.CompletedProcess[str], out: Path) -> None:
    """Assert that a command ended with one line that names a file and says that it could not be written, or why."""
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(out) in line and "damaged" not in line
    assert any(reason in line for reason in ("No space left", "is full", "disk I/O error"))


@pytest.mark.fault(
    "6", "the disk gets full at another moment each time", "one line, exit code 2; then resumed: nothing lost"
)
@pytest.mark.fault(
    "A4",
    "a full disk under the journal and all other files",
    "one line that names file and reason; nothing is called damaged",
    before="a traceback (journal), or 'damaged ... restore it'",
)
def test_a_disk_that_gets_full(commands: Commands, rounds: Rounds, figure: Figure) -> None:
    draw, twice = random.Random(6), 0
    for name, (least, most, few, many) in SIZES.items():
        full = 0
        differing = []
        tries = rounds(few, many)
        for number in range(tries):
            command = commands[name]
            out, kb = command.new(), round(least + (most - least) * (number + draw.random()) / tries)
            done = disks.run(out, kb, *command.arguments(out), **command.environment)
            if done.returncode:
                assert_one_line(done, out)
            full += bool(done.returncode)
            differing += [(kb, *names) for names in [command.differing(out)] if names]
            twice += command.server.paid_twice if command.server else 0
        if tries:
            figure(
                f"{name}: {full} of {tries} disks got full; {tries - len(differing)} of {tries} gave the same result"
            )
        assert not differing
        assert full or not tries
    figure(f"{twice} calls lost")
    assert not twice


@pytest.mark.fault(
    "7", "the disk gets full while pairs are written anew", "the old data set stays, whole, until the new one is"
)
@pytest.mark.fault("7", "the disk of the log is full", "the search goes on; the same rows")
def test_a_full_disk_takes_no_data_set_away_and_a_full_log_stops_nothing(
    commands: Commands, rounds: Rounds, figure: Figure, tmp_path: Path
) -> None:
    command = commands["build-tree"]
    run, logs = command.new(), tmp_path / "logs"
    logs.mkdir()
    (logs / "filler").write_bytes(bytes(4096))
    done = disks.run(logs, 4, *command.arguments(run), log="log")
    assert done.returncode == 0
    same = digests(run) == command.whole.result
    figure(f"with a full log disk: exit code {done.returncode}, rows {'equal' if same else 'DIFFERENT'}")
    other = shutil.copytree(run, tmp_path / "other")
    assert product.run("pairs", other, "--alpha", "0.5").returncode == 0
    old, new = digests(run), digests(other)
    held = sum(-(-path.stat().st_size // 4096) * 4 for path in run.rglob("*") if path.is_file())
    full = 0
    tries = rounds(1, 8)
    for number in range(tries):
        out = shutil.copytree(run, tmp_path / "run")
        done = disks.run(out, held + 32 + 4 + 4 * number, "pairs", out, "--alpha", "0.5")
        if done.returncode:
            full += 1
            assert_one_line(done, out)
            pairs = {name: digest for name, digest in digests(out).items() if name.startswith("pairs/")}
            assert pairs == {name: old[name] for name in pairs} and pairs.keys() <= old.keys()
            assert product.run("pairs", out, "--alpha", "0.5").returncode == 0
        assert digests(out) == new
        shutil.rmtree(out)
    figure(f"pairs: {full} of {tries} disks got full, {full} of {full} old data sets intact")
    assert same and full
