"""CPU that a call costs the explorer itself, next to a policy that costs nothing.

    python -m benchmarks.own_cost [--questions 24] [--rounds 3]

Whole builds with a journal on disk and the default search, medians of alternated rounds: the policy in this process,
the same with the token ids and log-probabilities that vLLM reports, over HTTP on a loopback server (a process of its
own whose CPU is not counted), and there with prompts that are encoded here, as documented for vLLM (a quarter of the
questions, with the demo policy's tokenizer). `py-spy record -- python -m benchmarks.own_cost` shows where it goes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

from benchmarks.stub import StubPolicy, parts, questions, server
from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import Build, build_trees
from reasonrag.pipeline.parts import open_llm
from reasonrag.training.model import model_path

ENCODED = "over HTTP, prompts encoded here"
LIMITS = {"in process": 0.25, "with ids and log-probs": 0.30, "over HTTP": 0.50, ENCODED: None}  # CPU ms a call


def build(kind: str, count: int, url: str) -> tuple[float, float]:
    """Return the CPU milliseconds of a call, and the bytes of journal."""
    overrides: dict[str, object] = {"policy.spec": url, "policy.model": "stub"} if "over HTTP" in kind else {}
    if kind == ENCODED:
        overrides |= {"policy.api": "completions", "policy.vllm": True, "policy.logprobs": True}
        overrides["policy.tokenizer"] = str(model_path("demo"))
        count = max(count // 4, 1)
    config = load_config(overrides=overrides)
    policy = open_llm(config.policy, "policy") if overrides else StubPolicy(ids="ids" in kind)
    figures: list[tuple[float, int]] = []

    @contextlib.asynccontextmanager
    async def measured(build: Build) -> AsyncIterator[None]:
        before = time.process_time()
        yield
        figures.append((time.process_time() - before, build.progress.calls))

    with tempfile.TemporaryDirectory() as folder:
        given = parts(questions(count), ReasonRAGFormat(), policy)
        build_trees(config, Path(folder) / "run", parts=given, show=measured)
        ((spent, calls),) = figures
        size = sum(file.stat().st_size for file in Path(folder).rglob("journal.sqlite*"))
        return spent / calls * 1e3, size / calls


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    table = Table(__doc__)
    costs: dict[str, list[float]] = {kind: [] for kind in LIMITS}
    sizes: dict[str, float] = {}
    references = []
    with server() as url:
        build("over HTTP", 1, url)  # imports
        for _ in range(given.rounds):
            references.append(reference())
            for kind in LIMITS:
                cost, sizes[kind] = build(kind, given.questions, url)
                costs[kind].append(cost)
    for kind, limit in LIMITS.items():
        table.row(f"a call {kind}", median(costs[kind]), "CPU ms", limit=f"<= {limit}" if limit else "")
    for kind in LIMITS:
        table.row(f"journal of a call {kind}", sizes[kind], "bytes")
    table.row("a million additions in Python", median(references), "CPU ms")
    table.note(f"default search, {given.questions} questions, medians of {given.rounds} alternated rounds")
    table.note("a million additions take 27 ms on a core of its own: more says that others slow down every figure here")
    table.show(given.json)


def reference() -> float:
    """Return the CPU milliseconds of a fixed piece of work."""
    before, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return (time.process_time() - before) * 1e3


if __name__ == "__main__":
    main()
