"""CPU that a call costs the explorer itself, next to a policy that costs nothing, and where it goes.

    python -m benchmarks.own_cost [--questions 24] [--rounds 3]

Whole builds with a journal on disk and the default search, medians of alternated rounds: the policy in this process,
the same with the token ids and log-probabilities that vLLM reports, over HTTP on a loopback server (a process of its
own whose CPU is not counted), and there with prompts that are encoded here, as documented for vLLM (a quarter of the
questions, with the demo policy's tokenizer). The shares are those of one more build, sampled once a millisecond of CPU;
other threads, measured by their own clocks, are those that write the journal and encode prompts.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from types import FrameType

from benchmarks.stub import StubPolicy, parts, questions, server
from benchmarks.table import Table, options
from reasonrag.core.config import load_config
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import Build, build_trees
from reasonrag.pipeline.models import open_llm
from reasonrag.training.model import model_path

ENCODED = "over HTTP, prompts encoded here"
LIMITS = {"in process": 0.25, "with ids and log-probs": 0.30, "over HTTP": 0.50, ENCODED: None}  # CPU ms a call
# The innermost frame that one of these names decides: (part of the path, functions or none for all), group.
GROUPS = (
    ("llm/journaled.py", ("request_key",), "request keys"),
    ("core/secrets.py", (), "redaction"),
    ("storage/parquet.py", (), "trees packed"),
    ("storage/journal.py", (), "journal"),
    ("llm/journaled.py", (), "journal"),
    ("retrieval/", (), "retrieval"),
    ("pipeline/build.py", ("tree_rows", "_node_row", "_step_columns", "label"), "tree rows"),
    ("formats/", (), "prompts and parsing"),
    ("llm/server.py", (), "HTTP"),
    ("llm/openai_wire.py", (), "HTTP"),
    ("core/http.py", (), "HTTP"),
    ("aiohttp/", (), "HTTP"),
    ("benchmarks/stub.py", (), "the stub"),
    ("reasonrag/rollout.py", (), "search"),
    ("mcts/", (), "search"),
    ("spre/", (), "search"),
    ("asyncio/", (), "event loop"),
)


def build(kind: str, count: int, url: str, shares: Shares | None = None) -> tuple[float, float]:
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
        if shares is not None:
            shares.start()
        before = time.process_time()
        yield
        figures.append((time.process_time() - before, build.progress.usage.calls))
        if shares is not None:
            shares.stop()

    with tempfile.TemporaryDirectory() as folder:
        given = parts(questions(count), ReasonRAGFormat(), policy)
        build_trees(config, Path(folder) / "run", parts=given, show=measured)
        ((spent, calls),) = figures
        size = sum(file.stat().st_size for file in Path(folder).rglob("journal.sqlite*"))
        return spent / calls * 1e3, size / calls


class Shares:
    """Samples where the main thread spends its CPU; the rest are other threads."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def start(self) -> None:
        self._process, self._thread = time.process_time(), time.thread_time()
        self._last = self._thread
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        whole, main = time.process_time() - self._process, time.thread_time() - self._thread
        self.seconds["other threads"] = whole - main

    def _sample(self, signum: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        spent, self._last = now - self._last, now
        innermost = frame
        while frame is not None:  # counting pairs calls what the search calls too
            if "pair_tables.py" in frame.f_code.co_filename:
                self.seconds["pairs counted for the panel"] += spent
                return
            frame = frame.f_back
        frame = innermost
        while frame is not None:
            path, function = frame.f_code.co_filename, frame.f_code.co_name
            for part, functions, group in GROUPS:
                if part in path and (not functions or function in functions):
                    self.seconds[group] += spent
                    return
            frame = frame.f_back
        self.seconds["other"] += spent


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    table = Table(__doc__)
    costs: dict[str, list[float]] = {kind: [] for kind in LIMITS}
    sizes: dict[str, float] = {}
    shares = {kind: Shares() for kind in LIMITS}
    references = []
    with server() as url:
        build("over HTTP", 1, url)  # imports
        for _ in range(given.rounds):
            references.append(reference())
            for kind in LIMITS:
                cost, sizes[kind] = build(kind, given.questions, url)
                costs[kind].append(cost)
        for kind in LIMITS:
            build(kind, given.questions, url, shares[kind])
    for kind, limit in LIMITS.items():
        table.row(f"a call {kind}", median(costs[kind]), "CPU ms", limit=f"<= {limit}" if limit else "")
    for kind in LIMITS:
        table.row(f"journal of a call {kind}", sizes[kind], "bytes")
    table.row("a million additions in Python", median(references), "CPU ms")
    for kind in LIMITS:
        whole = sum(shares[kind].seconds.values())
        groups = [f"{group} {seconds / whole:.0%}" for group, seconds in shares[kind].seconds.most_common()]
        table.note(f"{kind}: {', '.join(groups)}")
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
