"""Waits: threads, models and retrievers that never answer."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.errors import EX_TEMPFAIL
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM
from reasonrag.retrieval.base import PROBE
from tests import warmed
from tests.e2e import product
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.scripted import ScriptedLLM
from tests.fakes.stubs import Body, Fault, StubRetriever, Stuck, always
from tests.faults.matrix import ROOT, Figure, Rounds
from tests.llm.tiny import loaded

HERE = "python:tests.faults.test_stalls"
STALL_S = 8.0  # what a machine may take until all is in flight
AT_ONCE = 10


def hanging_thread(config: Any) -> TransformersLLM:
    """A model in this process whose thread never comes back from its first forward pass."""
    llm = loaded(demo_folder(""), device="cpu")
    llm.model.register_forward_pre_hook(lambda module, args: time.sleep(86_400))
    return llm


class BlockingLLM(ScriptedLLM):
    """A plug-in that waits on the event loop instead of beside it."""

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        time.sleep(86_400)  # noqa: ASYNC251
        return await super().complete(prompt, sampling)


def blocking(config: Any) -> BlockingLLM:
    return BlockingLLM([], name="blocking")


def after_check(body: Body) -> Fault | None:
    return None if body["queries"] == [PROBE] else Stuck()


def ended(runs: Sequence[tuple[str, Sequence[str]]], folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Start builds of some kinds, ten at once; return exit code and stderr of each, by kind. One that hangs raises."""
    found: dict[str, list[tuple[int, str]]] = {}
    for start in range(0, len(runs), AT_ONCE):
        children = []
        for number, (kind, flags) in enumerate(runs[start : start + AT_ONCE], start):
            asked = ("--preset", "demo", "--lag", "2", "--limit", "3", "--set", f"run.stall_s={STALL_S}", *flags)
            children.append(
                (kind, product.start("build-tree", *asked, "--out", folder / str(number), PYTHONPATH=str(ROOT)))
            )
        for kind, child in children:
            done = warmed.ended(child, 300)
            found.setdefault(kind, []).append((done.returncode, done.stderr))
    return found


# What never answers, and what names it on stderr: a thread's stack, or where tasks wait.
NAMES = {
    "a model's thread": r'test_stalls\.py", line \d+ in <lambda>',
    "an engine": r"\d tasks at \w+\.py:\d+ \w+",
    "a judge": r"\d tasks at \w+\.py:\d+ \w+",
    "a retriever": r"\d tasks at \w+\.py:\d+ \w+",
    "the event loop": r'test_stalls\.py", line \d+ in complete',
}


@pytest.mark.fault(
    "17",
    "no progress although all sockets are open",
    "the run is ended after run.stall_s with exit code 75, and the place that it waits at",
)
def test_what_never_answers_is_named_and_ended(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    count, blocked = rounds(1, 25), rounds(1, 5)
    stuck = FakeOpenAI(faults=always(Stuck()), models=("m",))
    with stuck as server, StubRetriever(after_check) as retriever:
        kinds: dict[str, Sequence[str]] = {
            "a model's thread": ("--policy", f"{HERE}:hanging_thread"),
            "an engine": ("--policy", server.base_url, "--policy-model", "m"),
            "a judge": ("--policy", "extractive", "--value", "judge", "--judge", server.base_url),
            "a retriever": ("--policy", "extractive", "--retriever-url", retriever.url),
        }
        # It ends ten seconds after that, so the others have twice the time.
        runs = [("the event loop", ("--policy", f"{HERE}:blocking", "--set", "run.stall_s=4"))] * blocked + [
            *kinds.items()
        ] * count
        found = ended(runs, tmp_path)
    named = {kind: sum(_named(kind, *end) for end in ends) for kind, ends in found.items()}
    figure(
        f"{sum(named.values())} of {len(runs)} runs ended by themselves and said what hung and where "
        f"({', '.join(f'{kind} {number}' for kind, number in named.items())}); 0 hangs"
    )
    wrong = [(kind, *end) for kind, ends in found.items() for end in ends if not _named(kind, *end)]
    assert not wrong, wrong[0]


def _named(kind: str, code: int, said: str) -> bool:
    # If the event loop is blocked, no task can end the run.
    message = kind == "the event loop" or "\nerror: the run stands still: " in said
    return code == EX_TEMPFAIL and message and re.search(NAMES[kind], said) is not None
