"""Metrics of a policy in the demo world by kind of question, as training writes them into `training.json`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Sequence
from contextlib import aclosing
from pathlib import Path

from reasonrag.core.text import exact_match
from reasonrag.core.types import Malformed, Question, Search, Trajectory
from reasonrag.demo.judge import demo_format, stream_format
from reasonrag.demo.world import Part, demo_corpus, make_world
from reasonrag.formats import Format, StreamFormat
from reasonrag.llm.base import LLM, Sampling
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.rollout import Engine
from tools.demo_policy.demonstrations import MAX_STEPS
from tools.demo_policy.writing import STREAM_STEPS, STREAM_TOKENS

Figures = dict[str, dict[str, float]]


def measure(
    llm: LLM, questions: Sequence[Question], *, temperature: float, world_seed: int = 0, seed: int = 0
) -> Figures:
    """Attempt each question once, with one passage per search, and average by kind (`all` over every question).

    Args:
        llm: the policy; its kernels decide how reproducible the metrics are.
        questions: questions of the world with seed `world_seed`.
        temperature: sampling temperature; 0 is greedy decoding.
        world_seed: seed of the world whose pages are searched.
        seed: random seed of the sampling.

    Returns:
        For each kind (`known` are the one-hop questions about famous entities): `n`, and means of `em` in [0, 1],
        `searches`, `steps`; `malformed` is the share of steps that could not be parsed.
    """
    return asyncio.run(_measure(llm, questions, temperature, world_seed, seed))


def measure_stream(
    llm: LLM, questions: Sequence[Question], *, format: str, temperature: float, world_seed: int = 0, seed: int = 0
) -> Figures:
    """Measure a format of one growing turn, with the quantities that its rewards are about.

    Returns:
        For each kind: `n`; means of `em`, `searches`, `completions`, and `tokens` (the policy's own); `well_formed`,
        the share of trajectories that are; `searched_em`, `em` among those that made every search that was needed;
        `without_search`, the share of questions answered without any; `own` and `own_wrong`, steps without a search a
        question, and the share of them that say what is not true.
    """
    spoken, sampling = stream_format(format), Sampling(temperature=temperature, max_tokens=STREAM_TOKENS)
    done = asyncio.run(_attempts(llm, questions, spoken, STREAM_STEPS, sampling, world_seed, seed))
    true = {hop for part in _parts(world_seed) for name in part.facts for hop in _evidences(part, name)}
    return {kind: _stream_figures(group, spoken, true) for kind, group in _by_kind(done).items()}


async def _measure(llm: LLM, questions: Sequence[Question], temperature: float, world_seed: int, seed: int) -> Figures:
    sampling = Sampling(temperature=temperature, max_tokens=32)
    done = await _attempts(llm, questions, demo_format(), MAX_STEPS, sampling, world_seed, seed)
    return {kind: _figures(group) for kind, group in _by_kind(done).items()}


async def _attempts(
    llm: LLM,
    questions: Sequence[Question],
    format: Format,
    max_steps: int,
    sampling: Sampling,
    world_seed: int,
    seed: int,
) -> list[Trajectory]:
    with tempfile.TemporaryDirectory() as cache:
        retriever = BM25Retriever.open(demo_corpus(world_seed), cache=Path(cache))
        engine = Engine(llm, retriever, format, max_steps=max_steps, top_k=1, sampling=sampling)
        async with aclosing(retriever):
            return await engine.run([Trajectory(q) for q in questions], seeds=range(seed, seed + len(questions)))


def _by_kind(done: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {"all": list(done)}
    for trajectory in done:
        groups.setdefault(_kind(trajectory.question), []).append(trajectory)
    return dict(sorted(groups.items()))


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


def _stream_figures(done: Sequence[Trajectory], format: StreamFormat, true: Collection[str]) -> dict[str, float]:
    readings = [format.read(trajectory) for trajectory in done]
    right = [exact_match(t.answer, t.question.golden_answers) for t in done]
    complete = [
        em
        for em, trajectory, reading in zip(right, done, readings, strict=True)
        if {hop["query"] for hop in trajectory.question.metadata["path"]} <= set(reading.queries)
    ]
    own = [
        block.conclusion in true or exact_match(block.conclusion, trajectory.question.golden_answers) > 0
        for trajectory, reading in zip(done, readings, strict=True)
        for block in reading.blocks
        if not block.is_search and block.conclusion
    ]
    completions = [step.completion for trajectory in done for step in trajectory.steps]
    figures = {
        "em": sum(right) / len(done),
        "well_formed": sum(reading.well_formed for reading in readings) / len(done),
        "searches": sum(len(reading.queries) for reading in readings) / len(done),
        "searched_em": sum(complete) / max(1, len(complete)),
        "without_search": sum(not reading.queries for reading in readings) / len(done),
        "own": len(own) / len(done),
        "own_wrong": own.count(False) / max(1, len(own)),
        "completions": len(completions) / len(done),
        "tokens": sum(completion.completion_tokens or 0 for completion in completions) / len(done),
    }
    return {"n": len(done), **{name: round(value, 3) for name, value in figures.items()}}


def _parts(world_seed: int) -> list[Part]:
    world = make_world(world_seed)
    return [*world.parts.values(), world.famous]


def _evidences(part: Part, name: str) -> list[str]:
    return [part.hop(name, key).evidence for key in part.facts[name]]
