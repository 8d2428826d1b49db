"""Trajectories made by the real engine and formats from scripted words, and judges that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from reasonrag.core.types import Question, Trajectory
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.rewards import RewardParts, Score
from reasonrag.rewards.base import Reward
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever

RIGHT = "Steven Spielberg"


def trajectory(format: str, *words: str, question: Question = QUESTION, max_steps: int = 8) -> Trajectory:
    """What the engine makes of a policy that says these words."""
    engine = Engine(ScriptedLLM(list(words)), ToyRetriever(), FORMATS[format](), max_steps=max_steps)
    (made,) = asyncio.run(engine.run([Trajectory(question)], seeds=[0]))
    return made


def hiprag(
    *steps: tuple[str | None, str], answer: str = RIGHT, tail: str = "", question: Question = QUESTION
) -> Trajectory:
    """Steps of (query or None, conclusion), then the answer."""
    words: list[str] = []
    opening = ""  # of the first step the engine has opened the tags
    for query, conclusion in steps:
        if query is None:
            words.append(f"{opening}I know this</reasoning>\n<conclusion>{conclusion}</conclusion>")
        else:
            words += [f"{opening}I must look</reasoning>\n<search>{query}</search>", f"{conclusion}</conclusion>"]
        opening = "<step>\n<reasoning>"
    return trajectory("hiprag", *words, f"</think>{tail}\n<answer>{answer}</answer>", question=question)


def search_p1(*queries: str, answer: str = RIGHT, stray: str = "", question: Question = QUESTION) -> Trajectory:
    """A plan, a call for each query, and the answer; `stray` stands where no text may be."""
    opening = "1. look 2. answer</reasoning>"
    words = []
    for query in queries:
        words.append(f"{opening}{stray}<tool_call>{query}</tool_call>")
        opening = ""
    return trajectory("search_p1", *words, f"{opening}{stray}<answer>{answer}</answer>", question=question)


def when_to_search(*queries: str, answer: str = RIGHT, stray: str = "") -> Trajectory:
    """A thought, a search and a reflection for each query (or a reflection alone), and the answer."""
    words, opening = [], "<think>hm</think>"
    for query in queries:
        words.append(f"{opening}<search>{query}</search>")
        opening = "<reflect>so</reflect>"
    reflection = opening if queries else f"{opening}<reflect>so</reflect>"
    return trajectory("when_to_search", *words, f"{reflection}{stray}<answer>{answer}</answer>")


def fields(text: str) -> dict[str, str]:
    """The labelled lines of a judge's request."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def judge(reply: Callable[[str], str | Exception], **options: object) -> JudgeService:
    """A judge that replies to the user's message."""
    llm = ScriptedLLM(lambda prompt, sampling: reply(prompt.messages[-1].content), name="judge")
    return JudgeService(llm, PromptSet.find(), **options)  # type: ignore[arg-type]


def asked(service: JudgeService) -> list[str]:
    """The requests that a scripted judge got."""
    assert isinstance(service.llm, ScriptedLLM)
    return [prompt.messages[-1].content for prompt in service.llm.prompts]


def knowing(known: dict[str, str]) -> ScriptedLLM:
    """A policy that says what it knows to a bare query, and else that it knows nothing."""
    return ScriptedLLM(lambda prompt, sampling: known.get(prompt.messages[-1].content, "I do not know."), name="policy")


def parts(format: str, **more: object) -> RewardParts:
    """Parts for a format."""
    return RewardParts(FORMATS[format](), **more)  # type: ignore[arg-type]


def score(reward: Reward, *trajectories: Trajectory, step: int = 0) -> list[Score]:
    """Scores of a batch."""
    return asyncio.run(reward.score(trajectories, step=step))


def values(scores: Sequence[Score]) -> list[float | None]:
    """Their values, rounded for comparison."""
    return [None if s.value is None else round(s.value, 9) for s in scores]
