"""Shards as Ray tasks: whatever dies, the rows are those of one process, and only calls in flight are paid twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.cluster import Nodes, workers
from reasonrag.storage.journal import Journal
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World

SHARDS, CONCURRENCY = 4, 4
IN_FLIGHT = CONCURRENCY  # of a shard: a request keeps its slot until its reply is on disk
SETTINGS = ("--iterations", "8", "--seed", "7", "--concurrency", str(CONCURRENCY))

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Reference:
    """What one process leaves, and what shards by hand leave."""

    trees: list[product.Row]
    pairs: list[product.Row]
    files: dict[str, str]
    calls: int


@pytest.fixture(scope="module")
def reference(world: World, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    with ExtractiveServer() as server:
        product.build(*world.flags, *server.flags, *SETTINGS, "--out", folder / "whole")
        calls = len(server.requests)
        for number in range(SHARDS):
            shard = f"{number}/{SHARDS}"
            product.build(*world.flags, *server.flags, *SETTINGS, "--out", folder / "shards", "--shard", shard)
    trees, pairs = product.tree_rows(folder / "whole"), product.pair_rows(folder / "whole")
    assert (product.tree_rows(folder / "shards"), product.pair_rows(folder / "shards")) == (trees, pairs)
    return Reference(trees, pairs, product.file_digests(folder / "shards"), calls)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.shutdown()


def kept(out: Path) -> int:
    """Return how many calls the journals of all shards hold."""
    calls = 0
    for path in out.glob("shards/*/journal.sqlite"):
        with closing(Journal(path)) as journal:
            calls += journal.usage()["policy"].calls
    return calls


def test_whatever_dies_the_rows_are_the_same(world: World, reference: Reference, nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ExtractiveServer(latency_s=0.05) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", out, "--ray", nodes.address)

        def reach(share: float) -> None:
            product.wait_until(lambda: len(server.requests) > share * reference.calls, 120)

        driver = product.start("build-tree", *args, "--shards", str(SHARDS))
        reach(0.15)
        driver.send_signal(signal.SIGINT)
        _, said = driver.communicate(timeout=120)
        assert driver.returncode == 130 and "all finished work is kept" in said
        assert kept(out) == len(server.paid), "a stop loses no call that is paid for"

        driver = product.start("build-tree", *args)  # as many shards as the folder has
        reach(0.3)
        driver.kill()
        driver.communicate(timeout=60)
        driver = product.start("build-tree", *args)
        reach(0.45)
        product.wait_until(lambda: bool(workers(out)))
        os.kill(workers(out)[0], signal.SIGKILL)
        reach(0.6)
        nodes.remove()
        printed, said = driver.communicate(timeout=240)
        assert driver.returncode == 0, said
    assert product.tree_rows(out) == reference.trees
    assert product.pair_rows(out) == reference.pairs
    assert product.file_digests(out) == reference.files
    # All shards died with the second driver, one alone, and those of a node with it.
    assert server.paid_twice <= (SHARDS + 1 + SHARDS) * IN_FLIGHT
    assert len(server.paid) == reference.calls
    assert "16 of 16" in printed and "16/16 questions" in said
