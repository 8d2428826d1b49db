"""How much memory a finished question leaves behind in the process that builds the trees.

    python -m benchmarks.memory [--questions 4000] [--warm-up 2000] [--iterations 2] [--json]

A policy that costs nothing answers; the search, the engine and the journal on disk are real. The anonymous memory of
the process is read whenever 1 % of the questions have finished, and a line is fitted through what is read after the
warm-up. `--questions 20000 --warm-up 2000` takes about 10 minutes, with `--iterations 64` an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from benchmarks.process import memory_bytes
from benchmarks.stub import StubPolicy, parts, questions
from benchmarks.table import Table, options
from reasonrag.core.config import Config, load_config
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import Build, build_trees
from reasonrag.pipeline.parts import Parts


def anonymous_mb() -> float:
    return memory_bytes("RssAnon") / 1e6


def watched(config: Config, out: Path, given: Parts) -> list[tuple[int, float]]:
    """Build the trees; return how many had finished and the memory in MB, read about a hundred times."""
    seen: list[tuple[int, float]] = []

    async def watch(build: Build) -> None:
        while True:
            if build.progress.done >= (seen[-1][0] if seen else 0) + build.progress.total / 100:
                seen.append((build.progress.done, anonymous_mb()))
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def watching(build: Build) -> AsyncIterator[None]:
        task = asyncio.create_task(watch(build))
        try:
            yield
        finally:
            task.cancel()

    build_trees(config, out, parts=given, show=watching)
    return seen


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--warm-up", type=int, default=2000, help="finished questions before the first reading counts")
    parser.add_argument("--iterations", type=int, default=2)
    given = parser.parse_args()
    table = Table(__doc__)
    config = load_config(overrides={"search.iterations": given.iterations})
    policy = StubPolicy()
    given_parts = parts(questions(given.questions), ReasonRAGFormat(), policy)
    before = anonymous_mb()
    with tempfile.TemporaryDirectory() as place:
        seen = watched(config, Path(place) / "run", given_parts)
    finished, memory = np.array([reading for reading in seen if reading[0] >= given.warm_up]).T
    slope, _ = np.polyfit(finished, memory, 1)
    table.row("per 1,000 finished questions", 1000 * slope, "MB", limit="<= 1")
    table.row("before the first question", before, "MB")
    table.row("after the warm-up", memory[0], "MB")
    table.row("at the end", memory[-1], "MB")
    table.note(
        f"{given.questions:,} questions of {given.iterations} iterations, {policy.calls:,} calls; "
        f"{len(memory)} readings after {given.warm_up:,} questions"
    )
    table.show(given.json)


if __name__ == "__main__":
    main()
