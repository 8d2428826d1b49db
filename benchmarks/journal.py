"""The journal: what a call costs in it, what it keeps of a reply, and how a large finished run opens.

    python -m benchmarks.journal [--questions 500] [--rounds 3]

Calls are written 64 at a time, as so many tasks that wait for their replies would write them. The finished run has 60
calls and a tree of 61 nodes a question, with token ids and log-probabilities; what it takes to open is also given for
20,000 questions, in proportion.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from benchmarks.stub import StubPolicy, StubRetriever, questions
from benchmarks.table import Table, options
from reasonrag.core.config import SearchConfig
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import Caller, Sampling, caller
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.mcts import TreeSearch
from reasonrag.pipeline.tables import tree_rows
from reasonrag.rollout import Engine
from reasonrag.spre import RolloutEvaluator
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import pack
from reasonrag.storage.tables import tree_schema

CALLS, NODES, AT_ONCE, WHOLE = 60, 61, 64, 20_000


class Hasty(Journal):
    """A journal that does not wait for the disk, to tell what waiting costs."""

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        connection.execute("PRAGMA synchronous=OFF")
        return connection


def cpu(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


PROMPT = ReasonRAGFormat().prompt(questions(1)[0], ())


async def ask(llm: JournaledLLM, question: str, seeds: Iterable[int]) -> None:
    caller.set(Caller(question))
    for seed in seeds:
        await llm.complete(PROMPT, Sampling(seed=seed))


async def work(journal: Journal, ids: bool, names: Iterable[str]) -> None:
    """Make the calls of some questions, `AT_ONCE` questions at a time."""
    llm, waiting = JournaledLLM(StubPolicy(ids=ids), journal, kind="policy"), iter(names)

    async def take() -> None:
        for name in waiting:
            await asyncio.create_task(ask(llm, name, range(CALLS)))

    await asyncio.gather(*(take() for _ in range(AT_ONCE)))


def a_tree() -> bytes:
    """Return the blob of a tree of about `NODES` nodes."""
    engine = Engine(StubPolicy(ids=True), StubRetriever(), ReasonRAGFormat())
    search = TreeSearch(engine, RolloutEvaluator(engine), SearchConfig(iterations=24))
    for question in questions(1_000):
        tree = asyncio.run(search.run(question))
        if len(tree.nodes) == NODES:
            return pack(tree_rows(tree, engine.format, alpha=0.9), tree_schema())
    raise AssertionError(f"no tree of {NODES} nodes")


def finished_run(path: Path, count: int) -> None:
    """Write the journal of a finished run."""
    blob = a_tree()

    async def fill(journal: Journal) -> None:
        names = [str(number) for number in range(count)]
        await work(journal, True, (f"bench/{name}" for name in names))
        for start in range(0, count, 256):
            await asyncio.gather(*(journal.put_tree("bench", name, blob) for name in names[start : start + 256]))

    with contextlib.closing(Journal(path)) as journal:
        asyncio.run(fill(journal))


def measured_puts(path: Path, kind: type[Journal], ids: bool) -> tuple[float, float]:
    """Return the CPU microseconds of a call that is stored, and the bytes of its reply."""
    with contextlib.closing(kind(path)) as journal:
        spent = cpu(lambda: asyncio.run(work(journal, ids, (f"bench/{n}" for n in range(AT_ONCE)))))
        (size,) = journal._reader.execute("SELECT SUM(LENGTH(reply)) FROM calls").fetchone()
    return spent / AT_ONCE / CALLS * 1e6, size / AT_ONCE / CALLS


def measured_look_ups(path: Path) -> dict[str, float]:
    """Return the CPU microseconds of look-ups in a finished run."""

    def each(look: Callable[[int], object], count: int = 2_000) -> float:
        return cpu(lambda: [look(n) for n in range(count)]) / count * 1e6

    with contextlib.closing(Journal(path)) as journal:
        llm = JournaledLLM(StubPolicy(), journal, kind="policy")

        def replay(_: int) -> None:
            asyncio.run(ask(llm, "bench/7", range(CALLS)))

        journal.call("", "bench/7")  # checks the pages of all calls
        costs = {
            "a look-up that fails, of a question in work": each(lambda n: journal.call(f"{n:032x}", "bench/7")),
            "a look-up that fails, of a search": each(lambda n: journal.call(f"{n:032x}")),
            "a question that nobody has asked for yet": each(lambda n: journal.call(f"{n:032x}", f"new/{n}")),
            "a reply that is replayed": each(replay, 20) / CALLS,
        }
        assert not llm.answered, "a reply of the run was not found"
    return costs


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    table = Table(__doc__)
    variants = {
        "a call that is stored": (Journal, False),
        "the same without waiting for the disk": (Hasty, False),
        "with 60 ids and log-probs": (Journal, True),
    }
    costs: dict[str, list[float]] = {what: [] for what in variants}
    sizes: dict[str, float] = {}
    times: dict[str, list[float]] = {"opening it": [], "which of its questions are finished": [], "its totals": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(given.rounds):
            for what, (kind, ids) in variants.items():
                spent, sizes[what] = measured_puts(folder / f"{number}-{what}.sqlite", kind, ids)
                costs[what].append(spent)
        path = folder / "run.sqlite"
        finished_run(path, given.questions)
        for _ in range(given.rounds):
            before = time.process_time()
            with contextlib.closing(Journal(path)) as journal:
                times["opening it"].append(time.process_time() - before)
                times["which of its questions are finished"].append(cpu(journal.finished))
                times["its totals"].append(cpu(journal.usage))
        look_ups = measured_look_ups(path)
        megabytes = path.stat().st_size / 1e6
    for what, figures in costs.items():
        table.row(what, median(figures), "CPU us")
    table.row("its reply", sizes["a call that is stored"], "bytes")
    table.row("its reply with 60 ids and log-probs", sizes["with 60 ids and log-probs"], "bytes")
    for what, cost in look_ups.items():
        table.row(what, cost, "CPU us")
    table.row(f"a finished run of {given.questions:,} questions", megabytes, "MB")
    for what, figures in times.items():
        table.row(what, median(figures), "CPU s")
    whole = sum(map(median, times.values())) * WHOLE / given.questions
    table.row(f"all three of {WHOLE:,} questions", whole, "CPU s", limit="<= 2")
    table.show(given.json)


if __name__ == "__main__":
    main()
