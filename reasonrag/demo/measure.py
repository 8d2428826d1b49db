"""How good a policy is in the demo world, by kind of question: what training writes into `training.json`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from reasonrag.demo.demonstrations import MAX_STEPS, demo_format
from reasonrag.demo.world import demo_corpus
from reasonrag.llm.base import LLM, Sampling
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.rollout.engine import Engine
from reasonrag.text import exact_match
from reasonrag.types import Malformed, Question, Search, Trajectory

Figures = dict[str, dict[str, float]]


def measure(
    llm: LLM, questions: Sequence[Question], *, temperature: float, world_seed: int = 0, seed: int = 0
) -> Figures:
    """Run one attempt at each question, one passage a search, and average by kind (`all` over every question).

    Args:
        llm: the policy; its kernels decide how reproducible the figures are.
        questions: of the world with seed `world_seed`.
        temperature: 0 is greedy.
        world_seed: whose pages are searched.
        seed: of the sampling.

    Returns:
        For each kind (`known` are the one-hop questions about famous entities): `n`, and means of `em` in [0, 1],
        `searches`, `steps`; `malformed` is the share of steps that could not be read.
    """
    return asyncio.run(_measure(llm, questions, temperature, world_seed, seed))


async def _measure(llm: LLM, questions: Sequence[Question], temperature: float, world_seed: int, seed: int) -> Figures:
    with tempfile.TemporaryDirectory() as cache:
        retriever = BM25Retriever.open(demo_corpus(world_seed), cache=Path(cache))
        sampling = Sampling(temperature=temperature, max_tokens=32)
        engine = Engine(llm, retriever, demo_format(), max_steps=MAX_STEPS, top_k=1, sampling=sampling)
        try:
            done = await engine.run([Trajectory(q) for q in questions], seeds=range(seed, seed + len(questions)))
        finally:
            await retriever.aclose()
    groups: dict[str, list[Trajectory]] = {"all": done}
    for trajectory in done:
        groups.setdefault(_kind(trajectory.question), []).append(trajectory)
    return {kind: _figures(group) for kind, group in sorted(groups.items())}


def _kind(question: Question) -> str:
    return "known" if question.metadata["known"] else str(question.metadata["kind"])


def _figures(done: Sequence[Trajectory]) -> dict[str, float]:
    steps = [step for trajectory in done for step in trajectory.steps]
    sums = {
        "em": sum(exact_match(trajectory.answer, trajectory.question.golden_answers) for trajectory in done),
        "searches": sum(isinstance(step.action, Search) for step in steps),
        "steps": len(steps),
    }
    malformed = sum(isinstance(step.action, Malformed) for step in steps) / len(steps)
    return {
        "n": len(done),
        **{name: round(total / len(done), 3) for name, total in sums.items()},
        "malformed": round(malformed, 4),
    }
