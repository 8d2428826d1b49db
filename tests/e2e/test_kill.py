"""SIGKILL at any moment costs nothing but the calls in flight: the same command goes on and ends with the same rows."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warmed
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World

LATENCY_S = 0.01
CONCURRENCY = 8
IN_FLIGHT = CONCURRENCY  # a request keeps its slot until its reply is on disk
SETTINGS = ("--iterations", "12", "--rollouts", "2", "--seed", "7", "--concurrency", str(CONCURRENCY))

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Reference:
    """What an uninterrupted run leaves, and how many calls it takes."""

    out: Path
    trees: list[product.Row]
    pairs: list[product.Row]
    files: dict[str, str]
    calls: int


@pytest.fixture(scope="module")
def reference(world: World, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    out = tmp_path_factory.mktemp("reference") / "run"
    with ExtractiveServer(latency_s=LATENCY_S) as server:
        product.build(*world.flags, *server.flags, *SETTINGS, "--out", out)
    assert server.paid_twice == 0
    trees, pairs = product.tree_rows(out), product.pair_rows(out)
    assert len(pairs) > 50
    return Reference(out, trees, pairs, product.file_digests(out), len(server.requests))


def kill(child: warmed.Child | subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=60)
    assert child.returncode == -9, "it ended before it was killed"


def kill_mid_call(server: ExtractiveServer, args: tuple[str | Path, ...], at_request: int, delay_s: float) -> int:
    """Start, kill at the given request; returns the calls that were in flight."""
    child = product.start("build-tree", *args)
    product.wait_until(lambda: len(server.requests) >= at_request or child.poll() is not None)
    time.sleep(delay_s)
    in_flight = server.in_flight
    kill(child)
    product.wait_until(lambda: server.in_flight == 0)  # the server finishes what it began, and charges for it
    return in_flight


def same(reference: Reference, out: Path) -> tuple[bool, bool]:
    """Whether rows and file bytes equal the reference's."""
    rows = product.tree_rows(out) == reference.trees and product.pair_rows(out) == reference.pairs
    return rows, product.file_digests(out) == reference.files


@pytest.mark.parametrize("moment", range(4))
def test_killed_at_a_random_moment_it_ends_with_the_same_rows(
    moment: int, world: World, reference: Reference, tmp_path: Path
) -> None:
    draw = random.Random(moment)
    at_request, delay_s = draw.randrange(1, reference.calls - 2 * IN_FLIGHT), draw.uniform(0, LATENCY_S)
    with ExtractiveServer(latency_s=LATENCY_S) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", tmp_path / "run")
        in_flight = kill_mid_call(server, args, at_request, delay_s)
        product.build(*args)
    rows, files = same(reference, tmp_path / "run")
    print(
        f"kill {moment}: at request {at_request} of {reference.calls}, {in_flight} in flight, "
        f"paid twice {server.paid_twice}, rows equal {rows}, files equal {files}"
    )
    assert rows
    assert files
    assert server.paid_twice <= IN_FLIGHT
    assert len(server.paid) == reference.calls


def test_killed_three_times_it_ends_with_the_same_rows(world: World, reference: Reference, tmp_path: Path) -> None:
    with ExtractiveServer(latency_s=LATENCY_S) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", tmp_path / "run")
        moments = [round(share * reference.calls) for share in (0.2, 0.5, 0.8)]
        in_flight = [kill_mid_call(server, args, at_request, 0.004) for at_request in moments]
        product.build(*args)
    print(f"kills at requests {moments}: {in_flight} in flight, paid twice {server.paid_twice}")
    assert same(reference, tmp_path / "run") == (True, True)
    assert server.paid_twice <= 3 * IN_FLIGHT


def test_killed_while_it_starts_it_begins_again(world: World, reference: Reference, tmp_path: Path) -> None:
    with ExtractiveServer(latency_s=LATENCY_S) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", tmp_path / "run")
        for wait_s in (0.2, 0.5, 0.8, 1.1):
            child = product.start("build-tree", *args, fresh=True)
            time.sleep(wait_s)
            kill(child)
        product.build(*args)
    assert same(reference, tmp_path / "run") == (True, True)


def test_killed_while_it_exports_it_writes_the_tables_anew(world: World, reference: Reference, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference.out, out)
    with ExtractiveServer() as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", out)
        began = time.monotonic()
        product.build(*args)  # nothing left to do but the export
        whole_s = time.monotonic() - began
        draw, caught = random.Random(7), 0
        for _ in range(5):
            for table in ("trees", "pairs"):
                shutil.rmtree(out / table, ignore_errors=True)
            child = product.start("build-tree", *args)
            product.wait_until(lambda child=child: (out / "trees").exists() or child.poll() is not None)
            time.sleep(draw.uniform(0, 0.1 * whole_s))
            child.kill()
            child.communicate(timeout=60)
            caught += child.returncode == -9 and not (out / "pairs" / "test-00000-of-00001.parquet").exists()
        product.build(*args)
    left = [path.name for path in out.glob("*/.*")]
    print(f"5 kills in an export of {whole_s:.2f} s, {caught} before its end; left behind: {left or 'nothing'}")
    assert caught > 0
    assert same(reference, out) == (True, True)
    assert not server.requests
