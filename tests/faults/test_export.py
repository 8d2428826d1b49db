"""A process that dies while it writes tables: no file has its final name that is not whole, and the next run is."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.errors import DataError
from reasonrag.storage.parquet import read_batches
from reasonrag.storage.tables import pair_schema
from tests import warmed
from tests.e2e import product
from tests.faults.commands import Commands, digests
from tests.faults.matrix import Figure, Rounds

pytestmark = pytest.mark.slow

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate")


def dying(folder: str, step: int, most_bytes: int, *arguments: str) -> None:
    """Do what `reasonrag` does until its n-th change in a folder, or until a file grows beyond so many bytes."""
    steps = 0

    def count(event: str, values: tuple[Any, ...]) -> None:
        nonlocal steps
        writes = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in _CHANGES) and str(values[0]).startswith(folder):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    if most_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process within a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    warmed.reasonrag(*arguments)


def broken(out: Path) -> list[str]:
    """Names of the tables that can be seen and cannot be read to their end."""
    names = []
    for path in out.glob("pairs/[!.]*.parquet"):
        try:
            list(read_batches(path, pair_schema()))
        except DataError:
            names.append(path.name)
    return names


@pytest.mark.fault(
    "5",
    "the process dies at each of its steps while it writes tables, and within writes",
    "no broken file under a final name; after a restart the tables equal those of an undisturbed run",
)
def test_a_process_that_dies_while_it_writes_tables(
    commands: Commands, rounds: Rounds, figure: Figure, tmp_path: Path
) -> None:
    command = commands["build-tree"]
    run = command.new()
    command.finish(run)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    assert product.run("pairs", other, "--alpha", "0.5").returncode == 0
    largest = max(path.stat().st_size for path in other.glob("pairs/*.parquet"))
    died, bad, differing = 0, [], []
    # Steps until the command ends by itself, and bytes of a file within whose writing it dies; in the suite one each.
    within_writes = [(0, largest * part // 9) for part in range(1, rounds(2, 9))]
    at_steps = [(step, 0) for step in range(1, rounds(2, 100))]
    for step, size in (*within_writes, *at_steps):
        out = Path(shutil.copytree(run, tmp_path / "out"))  # its tables have another alpha
        arguments = ("pairs", str(out), "--alpha", "0.5")
        done = warmed.run(dying, str(out), step, size, *arguments, environment=product.environment())
        bad += broken(out)
        again = product.run(*arguments)
        if again.returncode or digests(out) != digests(other):
            differing.append((step, size))
        shutil.rmtree(out)
        if done.returncode == 0:
            break
        died += 1
    figure(f"died at {died} moments: {len(bad)} broken files under a final name, {len(differing)} results differ")
    assert died and not bad and not differing
