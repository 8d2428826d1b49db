"""Shards as Ray tasks: whatever dies, the bytes are those of shards by hand, and only calls in flight are paid twice.

`tests/pipeline/test_shards.py` compares shards by hand with a run in one piece.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing
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


def kept(out: Path) -> int:
    """Return how many calls the journals of all shards hold."""
    calls = 0
    for path in out.glob("shards/*/journal.sqlite"):
        with closing(Journal(path)) as journal:
            calls += sum(used.calls for kind, used in journal.usage().items() if kind == "policy")
    return calls


def test_whatever_dies_the_bytes_are_those_of_shards_by_hand(world: World, tmp_path: Path) -> None:
    by_hand, out = tmp_path / "by-hand", tmp_path / "run"
    with ExtractiveServer() as server:
        for number in range(SHARDS):
            shard = ("--out", by_hand, "--shard", f"{number}/{SHARDS}")
            product.build(*world.flags, *server.flags, *SETTINGS, *shard)
        calls = len(server.requests)
    nodes = Nodes()
    with closing(nodes), ExtractiveServer(latency_s=0.05) as server:
        args = (*world.flags, *server.flags, *SETTINGS, "--out", out, "--ray", nodes.address)

        def reach(share: float) -> None:
            product.wait_until(lambda: len(server.requests) > share * calls, 120)

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
    assert product.file_digests(out) == product.file_digests(by_hand)
    # All shards died with the second driver, one alone, and those of a node with it.
    assert server.paid_twice <= (SHARDS + 1 + SHARDS) * IN_FLIGHT
    assert len(server.paid) == calls
    assert "16 of 16" in printed and "16/16 questions" in said
