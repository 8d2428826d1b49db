"""What the search itself costs, next to a policy that costs nothing, and how well it keeps a slow policy busy.

    python benchmarks/build_tree.py

Prints medians of three runs. The first table compares with the bare policy; the second with `window / latency`, one
call in flight for every question of the window: rollouts (k = 2) put more in flight, the last questions to finish less.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from reasonrag.core.config import load_config
from reasonrag.core.types import Completion, Passage, Prompt, Question
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.build import Build
from reasonrag.pipeline.parts import Parts
from reasonrag.storage.runs import RunFolder

QUESTIONS = [Question(str(i), f"Who directed film number {i}?", ("somebody",), dataset="bench") for i in range(200)]
PASSAGES = tuple(Passage(str(i), f"Title {i}\n" + "some words of a passage " * 20) for i in range(3))


class InstantPolicy:
    """Draws an action from the seed; waits `latency_s` first, as a server would."""

    name = "instant"

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self.calls = 0

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        self.calls += 1
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        draw = random.Random(sampling.seed).random()
        if prompt.stop == ("</evidence>",):
            text = f"<evidence>{draw:.3f}</evidence>"
        elif prompt.stop == ("</answer>",) or draw < 0.35:
            text = "<answer>somebody</answer>" if draw < 0.2 else "<answer>nobody</answer>"
        else:
            text = f"<query>{draw:.3f}</query>"
        return (Completion(text, prompt_tokens=300, completion_tokens=20),)

    async def aclose(self) -> None:
        pass


class InstantRetriever:
    """Three passages, at once."""

    fingerprint = "instant"

    async def search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [PASSAGES[:top_k] for _ in queries]

    async def aclose(self) -> None:
        pass


def build(questions: int, *, latency_s: float = 0.0, concurrency: int = 64) -> tuple[int, float]:
    """Calls and seconds of a whole build, journal included."""
    config = load_config(overrides={"search.iterations": 16, "policy.concurrency": concurrency})
    policy = InstantPolicy(latency_s)
    parts = Parts(QUESTIONS[:questions], InstantRetriever(), ReasonRAGFormat(), policy, None, {})
    with tempfile.TemporaryDirectory() as folder, RunFolder.open(Path(folder) / "run", config, {}) as run:
        started = time.perf_counter()
        asyncio.run(Build(config, parts, run).trees())
        return policy.calls, time.perf_counter() - started


def bare(calls: int) -> tuple[int, float]:
    """The policy alone."""
    policy, prompt = InstantPolicy(), ReasonRAGFormat().prompt(QUESTIONS[0], ())

    async def ask() -> None:
        for seed in range(calls):
            await policy.complete(prompt, Sampling(seed=seed))

    started = time.perf_counter()
    asyncio.run(ask())
    return calls, time.perf_counter() - started


def rate(measure: Callable[[], tuple[int, float]]) -> float:
    """Median calls per second of three runs."""
    return median(calls / seconds for calls, seconds in (measure() for _ in range(3)))


def main() -> None:
    alone = rate(lambda: bare(10_000))
    whole = rate(lambda: build(60))
    print(f"{'':<34}{'calls/s':>10}{'ratio':>8}{'ms/call':>9}")
    print(f"{'policy alone':<34}{alone:>10.0f}{1:>8.2f}{1000 / alone:>9.3f}")
    print(f"{'whole build, journal on disk':<34}{whole:>10.0f}{whole / alone:>8.2f}{1000 / whole:>9.3f}")
    print(f"\n{'50 ms policy, questions at a time':<34}{'calls/s':>10}{'/ questions per latency':>25}")
    for window, questions in ((1, 2), (16, 16), (64, 64)):
        found = rate(lambda q=questions, w=window: build(q, latency_s=0.05, concurrency=w))
        print(f"{window:<34}{found:>10.0f}{found / (window / 0.05):>25.2f}")


if __name__ == "__main__":
    main()
