"""Shards as Ray tasks: whatever dies or is stopped, the bytes are those of shards by hand, and only calls in flight are
paid twice.

`tests/pipeline/test_shards.py` compares shards by hand with a run in one piece.
"""

from __future__ import annotations

import os
import random
import re
import signal
from contextlib import closing, suppress
from pathlib import Path

import pytest

from reasonrag.core.errors import EX_TEMPFAIL
from reasonrag.storage.journal import Journal
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World
from tests.faults.matrix import Figure, Rounds
from tests.faults.stubs import Stuck, always
from tests.llm.fake_openai import FakeOpenAI

SHARDS, CONCURRENCY = 2, 4  # calls at once of a shard: each keeps its slot until its reply is on disk
SETTINGS = ("--limit", "8", "--iterations", "8", "--seed", "7", "--concurrency", str(CONCURRENCY))

pytestmark = pytest.mark.slow


class Nodes:
    """A Ray cluster of this machine: a head without cores, and two nodes of one core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Nobody looks at a dashboard or at the workers' logs.
        head = {"num_cpus": 0, "include_dashboard": False, "include_log_monitor": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(2)]
        self.address = self._cluster.address
        self.close = self._cluster.shutdown

    def remove(self) -> None:
        """End one node without a warning; a new one takes its place."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))


def workers(run: Path) -> list[int]:
    """Return the tasks of Ray that build shards of a run now: each names itself in the lock that it holds."""
    named = [re.match(r"pid (\d+) ", lock.read_text()) for lock in run.glob("shards/*/.lock")]
    commands = {int(pid[1]): Path(f"/proc/{pid[1]}/cmdline") for pid in named if pid}
    # A process that was killed is still named in its lock.
    return [pid for pid, command in commands.items() if command.exists() and b"ray::" in command.read_bytes()]


def kept(out: Path) -> int:
    """Return how many calls the journals of all shards hold."""
    calls = 0
    for path in out.glob("shards/*/journal.sqlite"):
        with closing(Journal(path)) as journal:
            calls += sum(used.calls for kind, used in journal.usage().items() if kind == "policy")
    return calls


@pytest.mark.fault("1", "SIGKILL of Ray's driver, a task, a node", "the bytes of shards by hand; calls in flight twice")
@pytest.mark.fault("3", "SIGTERM to Ray's driver", "its shards drain, it exits with 143, and no paid call is lost")
@pytest.mark.fault("4", "Ctrl-C to Ray's driver", "its shards drain, it exits with 130, and no paid call is lost")
def test_whatever_dies_the_bytes_are_those_of_shards_by_hand(
    world: World, tmp_path: Path, rounds: Rounds, figure: Figure
) -> None:
    by_hand = tmp_path / "by-hand"
    with ExtractiveServer() as server:
        for number in range(SHARDS):
            shard = ("--out", by_hand, "--shard", f"{number}/{SHARDS}")
            product.build(*world.flags, *server.flags, *SETTINGS, *shard)
        calls = len(server.requests)
    runs = rounds(1, 5)
    nodes = Nodes()
    with closing(nodes), ExtractiveServer(latency_s=0.05) as server:
        killed = [Killed(nodes, server, (*world.flags, *server.flags, *SETTINGS), calls) for _ in range(runs)]
        for run, each in enumerate(killed):
            stop = (signal.SIGINT, signal.SIGTERM)[run % 2]
            each.go(tmp_path / f"run-{run}", random.Random(run), stop, rounds(2, 3))
    same = sum(product.file_digests(tmp_path / f"run-{run}") == product.file_digests(by_hand) for run in range(runs))
    kills, late = sum(each.kills for each in killed), sum(each.late for each in killed)
    twice = ", ".join(f"{each.twice} of {each.in_flight}" for each in killed)
    found = f"{same} of {runs} runs with {kills} kills and a stop each gave the same files ({late} kills came too late)"
    figure(f"{found}; calls paid twice, of those in flight: {twice}")
    assert same == runs
    assert all(each.twice <= each.in_flight for each in killed)


@pytest.mark.full
@pytest.mark.fault(
    "17",
    "a shard on Ray stands still",
    "the driver exits with 75, and names the shard and the place that it waits at",
    before="exit code 2",
)
def test_a_shard_that_stands_still_ends_the_driver_with_75_and_its_place(
    world: World, tmp_path: Path, figure: Figure
) -> None:
    with FakeOpenAI(faults=always(Stuck()), models=("m",)) as server:
        policy = ("--policy", server.base_url, "--policy-model", "m", "--set", "run.stall_s=15")
        driver = product.start("build-tree", *world.flags, *policy, *SETTINGS, "--out", tmp_path, "--ray", "local")
        _, said = driver.communicate(timeout=240)
    line = r"error: shard \d/\d on .*: the run stands still: .* for 15 s, .*\d tasks at .*server\.py:\d+ _send"
    named = re.search(line, said)
    figure(f"exit code {driver.returncode}, place {'named' if named else 'not named'}")
    assert (driver.returncode, bool(named)) == (EX_TEMPFAIL, True), said


class Killed:
    """A run whose driver, tasks and nodes die at random moments, after a driver that was asked to stop.

    Attributes:
        kills, late: what died, and what had ended before.
        twice, in_flight: calls that were paid twice, and those that may be.
    """

    def __init__(self, nodes: Nodes, server: ExtractiveServer, flags: tuple[str | Path, ...], calls: int) -> None:
        self.nodes, self.server, self.flags, self.calls = nodes, server, flags, calls
        self.kills = self.late = self.twice = self.in_flight = 0

    def go(self, out: Path, draw: random.Random, stop: signal.Signals, deaths: int) -> None:
        self.server.forget()
        args = (*self.flags, "--out", out, "--ray", self.nodes.address)
        stopped, *moments, last = sorted(draw.random() for _ in range(deaths + 2))

        driver = product.start("build-tree", *args, "--shards", str(SHARDS))
        self._reach(stopped)
        driver.send_signal(stop)
        _, said = driver.communicate(timeout=240)
        assert driver.returncode == 128 + stop and "all finished work is kept" in said and "Traceback" not in said, said
        product.wait_until(lambda: self.server.in_flight == 0)
        assert kept(out) == len(self.server.paid) == self.server.paid.total(), "a stop loses no call that is paid for"

        driver = product.start("build-tree", *args)  # as many shards as the folder has
        for kill_task, moment in zip((False, True, False), moments, strict=False):
            self._reach(moment)
            if kill_task:
                product.wait_until(lambda driver=driver: bool(workers(out)) or driver.poll() is not None)
                task = workers(out)[:1]
                self._count(CONCURRENCY, died=bool(task))
                for pid in task:
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGKILL)
            else:
                driver.kill()
                driver.communicate(timeout=60)
                self._count(SHARDS * CONCURRENCY, died=driver.returncode == -signal.SIGKILL)
                driver = product.start("build-tree", *args)
        self._reach(last)
        self._count(SHARDS * CONCURRENCY, died=driver.poll() is None)
        self.nodes.remove()
        _, said = driver.communicate(timeout=300)
        assert driver.returncode == 0, said
        self.twice = self.server.paid_twice
        assert len(self.server.paid) == self.calls

    def _count(self, in_flight: int, *, died: bool) -> None:
        self.kills, self.late = self.kills + died, self.late + (not died)
        self.in_flight += in_flight * died

    def _reach(self, share: float) -> None:
        product.wait_until(lambda: len(self.server.paid) >= share * self.calls, 300)
