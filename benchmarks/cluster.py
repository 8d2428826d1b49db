"""A run in shards on a Ray cluster of two local nodes: are the rows those of one process, whatever dies?

    python -m benchmarks.cluster [--questions 160] [--json]

The policy is a stub behind a server that counts requests which it has seen before. A shard's calls in flight, and those
that are answered and not on disk yet, may be paid twice when it is killed. Takes about 10 minutes on two free cores.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import stub
from benchmarks.table import ROOT, Table, options
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema

SHARDS, IN_FLIGHT = 16, 8  # calls in flight of a shard
PER_NODE = 4  # shards of a node with one core
LATENCY_S = 0.05
CALLS, AT_ONCE = 4_000, 64  # of the journals


class Run:
    """`build-tree` in a folder, against a server of its own, which counts what it pays for."""

    def __init__(self, folder: Path, url: str, questions: int) -> None:
        self.out, self.url = folder / "run", url
        rows = [
            {"id": q.id, "question": q.question, "golden_answers": q.golden_answers} for q in stub.questions(questions)
        ]
        passages = [{"id": str(n), "contents": f"Film {n}\nsomebody made film number {n}."} for n in range(questions)]
        for name, content in (("questions", rows), ("corpus", passages)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        files = ["--dataset", f"{folder}/questions.jsonl", "--corpus", f"{folder}/corpus.jsonl"]
        policy = ["--policy", url, "--policy-model", "stub", "--concurrency", str(IN_FLIGHT), "--iterations", "12"]
        self.arguments = [*files, "--set", f"retrieval.cache={folder}/cache", *policy, "--out", str(self.out)]

    def start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "reasonrag", "build-tree", *self.arguments, *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(self, *more: str) -> None:
        ended(self.start(*more))

    def count(self, name: str) -> int:
        """Return a count of the server."""
        with urllib.request.urlopen(f"{self.url}/models") as reply:
            return int(json.load(reply)[name])

    def wait_for(self, calls: int) -> None:
        while self.count("served") < calls:
            time.sleep(0.2)

    def rows(self) -> str:
        """Return a hash of all rows, in their order."""
        digest = hashlib.blake2b(digest_size=8)
        for place, stem, schema in (
            ("trees", "nodes", tree_schema()),
            ("pairs", "train", pair_schema()),
            ("pairs", "test", pair_schema()),
        ):
            there = any((self.out / place).glob(f"{stem}-*"))  # a split without rows has no file
            for row in read_shards(self.out / place, stem, schema) if there else ():
                digest.update(repr(sorted(row.items())).encode())
        return digest.hexdigest()

    def files(self) -> dict[str, str]:
        files = sorted(self.out.glob("*/*.parquet"))
        return {str(f.relative_to(self.out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def workers(run: Path) -> list[int]:
    """Return the tasks of Ray that build shards of a run now: each names itself in the lock that it holds."""
    named = [re.match(r"pid (\d+) ", lock.read_text()) for lock in run.glob("shards/*/.lock")]
    commands = {int(pid[1]): Path(f"/proc/{pid[1]}/cmdline") for pid in named if pid}
    # A process that was killed is still named in its lock.
    return [pid for pid, command in commands.items() if command.exists() and b"ray::" in command.read_bytes()]


def ended(child: subprocess.Popen[str]) -> None:
    _, said = child.communicate()
    if child.returncode:
        sys.exit(said)


@contextmanager
def run(name: str, questions: int) -> Iterator[Run]:
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, stub.server(LATENCY_S) as url:
        yield Run(Path(folder), url, questions)


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


def deaths(table: Table, questions: int) -> None:
    with run("one process", questions) as whole:
        whole.finish()
        rows, calls = whole.rows(), whole.count("served")
        table.row("one process: calls, none of them twice", calls)
        table.row("one process: calls paid twice", whole.count("repeated"), limit="== 0")
    with run("shards by hand", questions) as by_hand, ThreadPoolExecutor(2) as pool:
        list(pool.map(by_hand.finish, ["--shard"] * SHARDS, [f"{number}/{SHARDS}" for number in range(SHARDS)]))
        files = by_hand.files()
        table.row("shards by hand: rows as of one process", float(by_hand.rows() == rows), limit="== 1")
        table.row("shards by hand: calls paid twice", by_hand.count("repeated"), limit="== 0")
    nodes = Nodes()
    flags = ("--ray", nodes.address, "--shards", str(SHARDS))

    def dies(what: str, most: int, die: Callable[[Run, subprocess.Popen[str]], None], share: float) -> None:
        with run(what, questions) as on_ray:
            driver = on_ray.start(*flags)
            on_ray.wait_for(int(share * calls))
            die(on_ray, driver)
            if driver.poll() is None:
                ended(driver)
            else:
                on_ray.finish(*flags)
            table.row(f"{what}: rows as of one process", float(on_ray.rows() == rows), limit="== 1")
            table.row(f"{what}: bytes as by hand", float(on_ray.files() == files), limit="== 1")
            table.row(f"{what}: calls paid twice", on_ray.count("repeated"), limit=f"<= {most * IN_FLIGHT}")

    def kill_driver(on_ray: Run, driver: subprocess.Popen[str]) -> None:
        driver.kill()
        driver.wait()

    dies("a worker killed", 1, lambda on_ray, _: os.kill(workers(on_ray.out)[0], signal.SIGKILL), 0.3)
    dies("a node removed", PER_NODE, lambda *_: nodes.remove(), 0.5)
    dies("the driver killed and started again", 2 * PER_NODE, kill_driver, 0.4)
    nodes.close()


def journal(wal: bool) -> tuple[float, float]:
    """Return milliseconds of CPU and bytes to the disk of a call."""

    async def put(journal: Journal) -> None:
        numbers = iter(range(CALLS))

        async def work() -> None:
            for number in numbers:
                key = hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()
                await journal.put_call(key, "policy", [{"text": "x" * 300}], question=f"q/{number // 170}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # a real disk; /tmp may be memory
        written, used = _written(), time.process_time()
        with closing(Journal(Path(folder) / "journal.sqlite", wal=wal)) as opened:
            asyncio.run(put(opened))
        return (time.process_time() - used) / CALLS * 1e3, (_written() - written) / CALLS


def _written() -> int:
    return int(re.search(r"^write_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def journals(table: Table) -> None:
    runs: dict[bool, list[Any]] = {True: [], False: []}
    for _ in range(5):
        for wal, figures in runs.items():
            figures.append(journal(wal))
    cpu, size = ({wal: median(each[column] for each in figures) for wal, figures in runs.items()} for column in (0, 1))
    table.row("journal on a local disk (WAL): CPU of a call", cpu[True], "ms")
    table.row("journal on a shared disk (rollback): CPU of a call", cpu[False], "ms")
    table.row("journal on a local disk: bytes written of a call", size[True])
    table.row("journal on a shared disk: bytes written of a call", size[False])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=160)
    given = parser.parse_args()
    table = Table(__doc__)
    deaths(table, given.questions)
    journals(table)
    table.note(
        f"{given.questions} questions, 12 iterations, {SHARDS} shards, {PER_NODE} at a time on each "
        f"node, {IN_FLIGHT} calls in flight of a shard; the server takes {LATENCY_S:g} s"
    )
    table.note("rows and bytes: 1 is equal; calls paid twice are held against the calls that the dead had in flight")
    table.note(f"journals: medians of 5 alternated runs of {CALLS} calls of 300 characters, {AT_ONCE} at once")
    table.show(given.json)


if __name__ == "__main__":
    main()
