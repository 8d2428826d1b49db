"""Replies of models and retrievers: very long, cut off, odd; and the memory that they take."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stub
from benchmarks.memory import watched
from reasonrag.core.config import load_config
from reasonrag.core.types import Action, Completion, FinishReason, Passage, Trajectory
from reasonrag.core.types import Answer as Final
from reasonrag.formats import FORMATS, ReasonRAGFormat, open_format
from reasonrag.retrieval.remote import RemoteRetriever
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.fakes.stubs import StubRetriever, hit
from tests.faults.matrix import Figure, Rounds
from tests.toys import QUESTION, ToyRetriever


def print_peak(folder: str, count: int) -> None:
    """Print the most memory, in MB, while trees are built for so many questions."""
    given = stub.parts(stub.questions(count), ReasonRAGFormat(), stub.StubPolicy())
    readings = watched(load_config(overrides={"search.iterations": 2}), Path(folder), given)
    print(max(megabytes for _, megabytes in readings))


@pytest.mark.fault("20a", "ten times the questions", "the memory of the process that builds the trees within 10 %")
def test_memory_does_not_follow_the_questions(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    few, many = rounds(100, 600), rounds(400, 6000)  # fewer than 100 are all in flight at once

    def peak(count: int) -> float:
        # Each in a process of its own: memory that an export or another test has freed would be taken here first.
        code = f"from {__name__} import print_peak; print_peak({str(tmp_path / str(count))!r}, {count})"
        command = (sys.executable, "-c", code)
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    least, most = peak(few), peak(many)
    figure(f"{least:.0f} MB for {few} questions, {most:.0f} MB for {many}")
    assert most < 1.1 * least


ANSWERS = (
    "<think>I know.</think> <answer>Steven Spielberg</answer>",
    "So the answer is <answer>\\boxed{Steven Spielberg}</answer>",
    "Thought: I know.\nAction: Finish[Steven Spielberg]",
)


@pytest.mark.fault(
    "19", "a completion stops at max_tokens, after any of its characters but the last", "cut off; never an answer"
)
def test_what_was_cut_off_is_no_answer(figure: Figure) -> None:
    async def step(name: str, text: str) -> Action:
        llm = ScriptedLLM([Completion(text, FinishReason.LENGTH)])
        format = open_format(load_config(overrides={"format.name": name}), warn=False)
        made = await Engine(llm, ToyRetriever(), format, max_steps=1).step(Trajectory(QUESTION), seed=0)
        return made.steps[-1].action

    async def steps() -> list[Action]:
        cuts = [(name, text[:end]) for name in FORMATS for text in ANSWERS for end in range(1, len(text))]
        return [await step(*cut) for cut in cuts]

    actions = asyncio.run(steps())
    taken = sum(isinstance(action, Final) for action in actions)
    figure(f"{taken} of {len(actions)} taken as an answer, in {len(FORMATS)} formats")
    assert not taken


@pytest.mark.fault("24", "a retrieval server's scores are NaN, infinite, null or text", "0, and the passage is kept")
@pytest.mark.fault(
    "27",
    "a retriever finds a document of 10 MB, 10,000 documents, the same one three times, or nothing",
    "the prompt shows top_k, each cut with a mark; nothing found is said",
)
def test_what_a_retriever_may_find(figure: Figure) -> None:
    found: dict[str, list[dict[str, Any]]] = {
        "a long document": [hit("word " * 2_000_000)],
        "10,000 documents": [hit(f"number {n}") for n in range(10_000)],
        "one three times": [hit("again")] * 3,
        "nothing": [],
        "odd scores": [hit("odd", score) for score in (float("nan"), float("-inf"), None, "high")],
    }

    async def prompts(url: str) -> dict[str, tuple[tuple[Passage, ...], str]]:
        shown, format = {}, ReasonRAGFormat()
        retriever = RemoteRetriever(url)
        for name in found:
            llm = ScriptedLLM([f"<query>{name}</query>"])
            engine = Engine(llm, retriever, format, max_steps=3, top_k=3)
            (step,) = (await engine.step(Trajectory(QUESTION), seed=0)).steps
            shown[name] = step.passages, format.prompt(QUESTION, (step,)).messages[1].content
        await retriever.aclose()
        return shown

    with StubRetriever(results=lambda query, top_k: found[query]) as server:
        shown = asyncio.run(prompts(server.url))
    figure("; ".join(f"{name}: {len(p)} passages, {len(text):,} characters" for name, (p, text) in shown.items()))
    assert {name: len(passages) for name, (passages, _) in shown.items()} == {
        "a long document": 1,
        "10,000 documents": 3,
        "one three times": 3,
        "nothing": 0,
        "odd scores": 3,
    }
    assert max(len(text) for _, text in shown.values()) < 5000 and "[cut]" in shown["a long document"][1]
    assert "Documents:\nNone found.\n" in shown["nothing"][1]
    assert {passage.score for passage in shown["odd scores"][0]} == {0.0}
