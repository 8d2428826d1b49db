from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.types import Answer, Malformed, Note, Search, StopReason, Trajectory
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import Sampling
from reasonrag.rollout import Engine, FirstSteps, derive_seed
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, SPIELBERG, ToyRetriever

FORMAT = ReasonRAGFormat()


def run(engine: Engine, count: int = 1) -> list[Trajectory]:
    return asyncio.run(engine.run([Trajectory(QUESTION)] * count, seeds=list(range(count))))


def test_a_trajectory_searches_grounds_and_answers():
    llm = ScriptedLLM(["<query>Jaws</query>", "<evidence>by Spielberg</evidence>", "<answer>Spielberg</answer>"])
    retriever = ToyRetriever()
    (trajectory,) = run(Engine(llm, retriever, FORMAT))
    assert [step.action for step in trajectory.steps] == [Search("Jaws"), Note("by Spielberg"), Answer("Spielberg")]
    assert trajectory.steps[0].passages == (SPIELBERG,)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.answer == "Spielberg"
    assert retriever.queries == ["Jaws"]


def test_last_step_is_asked_to_answer():
    llm = ScriptedLLM(["<query>Jaws</query>", "<evidence>Spielberg</evidence>", "<answer>Spielberg</answer>"])
    (trajectory,) = run(Engine(llm, ToyRetriever(), FORMAT, max_steps=3))
    assert trajectory.stop_reason is StopReason.FORCED_ANSWER
    assert trajectory.steps[-1].action == Answer("Spielberg", forced=True)
    assert llm.prompts[-1] == FORMAT.prompt(QUESTION, trajectory.steps[:-1], final=True)
    assert llm.prompts[-1].stop == ("</answer>",)


def test_a_last_step_that_does_not_answer_ends_without_an_answer():
    llm = ScriptedLLM(["<query>Jaws</query>", "<evidence>x</evidence>", "I do not know"])
    (trajectory,) = run(Engine(llm, ToyRetriever(), FORMAT, max_steps=3))
    assert trajectory.stop_reason is StopReason.NO_ANSWER
    assert trajectory.answer is None and not trajectory.complete


def test_a_step_that_cannot_be_read_is_a_step_and_the_stage_stays():
    llm = ScriptedLLM(["<query>Jaws</query>", "hm", "<evidence>x</evidence>", "<answer>y</answer>"])
    (trajectory,) = run(Engine(llm, ToyRetriever(), FORMAT))
    assert trajectory.steps[1].action == Malformed("no_tag")
    assert llm.prompts[1] == llm.prompts[2], "what could not be read is not shown again"
    assert len(trajectory.steps) == 4


def test_a_backend_that_gives_up_raises_after_the_others_have_ended():
    ended = []

    def reply(prompt, sampling):
        if sampling.seed == derive_seed(0, 0):
            raise LLMError("gone", cause="unreachable")
        ended.append(sampling.seed)
        return "<answer>x</answer>"

    with pytest.raises(LLMError, match="gone"):
        run(Engine(ScriptedLLM(reply), ToyRetriever(), FORMAT), count=3)
    assert len(ended) == 2


def test_a_search_asks_for_top_k_passages():
    asked = []

    class Counting(ToyRetriever):
        async def search(self, queries, top_k):
            asked.append(top_k)
            return await super().search(queries, top_k)

    llm = ScriptedLLM(["<query>film directed</query>", "<evidence>x</evidence>", "<answer>y</answer>"])
    (trajectory,) = run(Engine(llm, Counting(), FORMAT, top_k=1))
    assert asked == [1]
    assert len(trajectory.steps[0].passages) == 1
    assert trajectory.answer == "y"


def test_a_greedy_policy_is_not_asked_again_what_it_could_not_answer_in_form():
    llm = ScriptedLLM(lambda prompt, sampling: "<answer>x</answer>" if prompt.stop == ("</answer>",) else "hm")
    engine = Engine(llm, ToyRetriever(), FORMAT, max_steps=5, sampling=Sampling(temperature=0.0))
    (trajectory,) = run(engine)
    assert len(trajectory.steps) == 4 and trajectory.stop_reason is StopReason.FORCED_ANSWER
    assert len(llm.prompts) == 2, "the step that cannot be read, and the forced answer"
    asked_again = Engine(llm, ToyRetriever(), FORMAT, max_steps=5, sampling=Sampling(temperature=0.01))
    assert run(asked_again)[0].steps == trajectory.steps
    assert len(llm.prompts) == 2 + 4


@pytest.mark.parametrize(
    ("readable", "most", "asked"),
    [({99}, 0.9, 12), (set(range(0, 99, 12)), 0.9, 60), (set(range(0, 99, 8)), 0.9, 99), (set(), 1.0, 99)],
    ids=["none", "few", "enough", "told to go on"],
)
def test_a_policy_whose_first_steps_cannot_be_read_is_asked_no_more(readable, most, asked):
    llm = ScriptedLLM(lambda prompt, sampling: "<answer>x</answer>" if len(llm.prompts) - 1 in readable else "\x1b[1m")
    first_steps = FirstSteps("hf:base", most_unreadable=most, longer="--max-tokens 64")
    engine = Engine(llm, ToyRetriever(), FORMAT, max_steps=2, first_steps=first_steps)
    said = ""
    for _ in range(99):
        try:
            asyncio.run(engine.step(Trajectory(QUESTION), seed=0))
        except RunError as error:
            said = str(error)
    assert len(llm.prompts) == asked
    if asked < 99:
        read = len([n for n in readable if n < asked])
        assert said.startswith(f"hf:base: {read} of the first {asked} steps can be read ({asked - read} no_tag), for")
        assert "'\\x1b[1m'" in said and said.endswith("pass --max-unreadable 1 to continue anyway")
