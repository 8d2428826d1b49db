"""Shards as Ray tasks: whatever dies, the rows are those of one process, and only calls in flight are paid twice."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World

SHARDS, CONCURRENCY = 6, 4
IN_FLIGHT = 2 * CONCURRENCY  # of a shard: sent and not answered, or answered and not on disk
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


class Nodes:
    """A Ray cluster of this machine: a head without cores, and two nodes that run four shards each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.address = self._cluster.address
        self.nodes = [self.add(), self.add()]

    def add(self) -> object:
        return self._cluster.add_node(num_cpus=1)

    def remove(self) -> None:
        """End one node without a warning, and start another in its place."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)
        self.nodes.append(self.add())

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.shutdown()


def workers(out: Path) -> list[int]:
    """Return the processes that build shards now: each names itself in the lock that it holds."""
    found = [re.match(r"pid (\d+) ", lock.read_text()) for lock in out.glob("shards/*/.lock")]
    return [int(pid[1]) for pid in found if pid]


def test_a_worker_is_killed_and_a_node_removed(
    world: World, reference: Reference, nodes: Nodes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with ExtractiveServer(latency_s=0.05) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", out, "--ray", nodes.address, "--shards", str(SHARDS))
        driver = product.start("build-tree", *args, fresh=True)
        product.wait_until(lambda: len(server.requests) > 0.2 * reference.calls, 120)
        os.kill(workers(out)[0], signal.SIGKILL)
        product.wait_until(lambda: len(server.requests) > 0.4 * reference.calls, 120)
        nodes.remove()
        printed, said = driver.communicate(timeout=240)
        assert driver.returncode == 0, said
    assert product.tree_rows(out) == reference.trees
    assert product.pair_rows(out) == reference.pairs
    assert product.file_digests(out) == reference.files
    assert server.paid_twice <= 5 * IN_FLIGHT
    assert len(server.paid) == reference.calls
    assert "16 of 16" in printed and "16/16 questions" in said


def test_the_driver_is_killed_and_stopped(world: World, reference: Reference, nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ExtractiveServer(latency_s=0.05) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", out, "--ray", nodes.address)
        for share, number in ((0.2, signal.SIGKILL), (0.4, signal.SIGINT)):
            driver = product.start("build-tree", *args, "--shards", str(SHARDS), fresh=True)
            product.wait_until(lambda share=share: len(server.requests) > share * reference.calls, 120)
            driver.send_signal(number)
            _, said = driver.communicate(timeout=120)
        assert driver.returncode == 130 and "all finished work is kept" in said
        paid_twice = server.paid_twice
        product.wait_until(lambda: server.in_flight == 0)
        product.build(*args, fresh=True, timeout_s=240)  # as many shards as the folder has
    assert product.file_digests(out) == reference.files
    assert paid_twice <= server.paid_twice <= SHARDS * IN_FLIGHT  # of the kill; none of the stop
    assert len(server.paid) == reference.calls
