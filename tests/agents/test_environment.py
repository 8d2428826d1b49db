"""The environment server over a real WebSocket: episodes equal the engine's, sessions apart, dropped ones end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from reasonrag.agents import environment as server
from reasonrag.agents.environment import CurrentPolicy, EnvironmentApp
from reasonrag.core.errors import RetrievalError
from reasonrag.core.serving import ListenSettings
from reasonrag.core.types import Prompt, Question, Trajectory
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.llm.base import Sampling
from reasonrag.rewards import RewardParts, RewardSettings, open_reward
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine, derive_seed
from tests.fakes.scripted import ScriptedLLM
from tests.serving import serving
from tests.toys import QUESTION, ToyRetriever

QUESTIONS = [QUESTION, replace(QUESTION, id="q2", question="Who directed Star Wars?", golden_answers=("George Lucas",))]
# Searches, a note, answers, a placeholder, no tag at all, and words after the stop string.
WORDS = (
    "<think>first</think><search>Jaws</search> and more",
    "<query>Jaws</query>",
    "<evidence>directed by Steven Spielberg</evidence>",
    "<think>so</think><answer>Steven Spielberg</answer>",
    "<answer>answer</answer>",
    "I do not know",
    "<think>second</think><search>Star Wars",
)


def says(prompt: Prompt) -> str:
    """The policy: chooses its words by the prompt alone."""
    shown = "".join(message.content for message in prompt.messages) + prompt.prefix
    return WORDS[derive_seed(shown) % len(WORDS)]


def make(format: str, llm: Any, retriever: Any = None, *, max_steps: int = 4) -> tuple[Engine, Any]:
    form = FORMATS[format](PromptSet.find("brief"))
    engine = Engine(llm, retriever or ToyRetriever(), form, max_steps=max_steps)
    return engine, open_reward(RewardSettings(), RewardParts(form))


@contextmanager
def environment(format: str, retriever: Any = None, *, max_steps: int = 4) -> Iterator[int]:
    engine, reward = make(format, CurrentPolicy(), retriever, max_steps=max_steps)
    with serving(EnvironmentApp(engine, reward, QUESTIONS, ListenSettings())) as port:
        yield port


def ask(client: ClientConnection, kind: str, **data: Any) -> dict[str, Any]:
    client.send(json.dumps({"type": kind, "data": data}))
    reply: dict[str, Any] = json.loads(client.recv(timeout=20))
    return reply


def play(client: ClientConnection, **chosen: Any) -> tuple[list[str], dict[str, Any]]:
    """Return what the policy was shown, and the end of the episode."""
    shown, data = [], ask(client, "reset", **chosen)["data"]
    while not data["done"]:
        seen = data["observation"]
        messages = "".join(message["content"] for message in seen["messages"])
        shown.append(messages + seen["prefix"])
        text = WORDS[derive_seed(shown[-1]) % len(WORDS)]
        data = ask(client, "step", text=text)["data"]
    return shown, data


@pytest.mark.parametrize("format", ["reasonrag", "search_r1"])
def test_an_episode_is_what_the_engine_does_with_the_same_policy(format: str) -> None:
    for max_steps in (2, 4, 8):
        llm = ScriptedLLM(lambda prompt, sampling: says(prompt))
        with environment(format, max_steps=max_steps) as port, connect(f"ws://127.0.0.1:{port}/ws") as client:
            for question in QUESTIONS:
                shown, end = play(client, question_id=question.id)
                # A server's client cuts at stop strings and restores them; `completed` does the same for this one.
                engine, reward = make(format, _Cut(llm), max_steps=max_steps)
                (trajectory,) = asyncio.run(engine.run([Trajectory(question)], seeds=[0]))
                (score,) = asyncio.run(reward.score([trajectory], step=0))
                prompts = [step.prompt for step in trajectory.steps]
                assert shown == ["".join(m.content for m in p.messages) + p.prefix for p in prompts]
                assert (end["reward"], end["observation"]["parts"]) == (score.value, score.parts)
                assert end["observation"]["answer"] == trajectory.answer
                assert end["observation"]["stop_reason"] == trajectory.stop_reason


class _Cut:
    """A policy behind a server that knows stop strings."""

    name = "cut"

    def __init__(self, llm: ScriptedLLM) -> None:
        self.llm = llm

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Any:
        from reasonrag.llm.openai_wire import Wire

        completion = await self.llm.complete(prompt, sampling)
        choice = {"message": {"content": completion.text}, "finish_reason": "stop"}
        return Wire("m").completion(json.dumps({"choices": [choice]}).encode(), prompt, sampling)

    async def aclose(self) -> None:
        pass


def test_inserted_text_is_what_follows_the_words_of_the_policy() -> None:
    with environment("search_r1") as port, connect(f"ws://127.0.0.1:{port}/ws") as client:
        first = ask(client, "reset", question=QUESTION.question)["data"]["observation"]
        written = "<think>a</think><search>Jaws</search>"
        second = ask(client, "step", text=written)["data"]["observation"]
        assert second["prefix"] == first["prefix"] + written + second["inserted"]
        assert "Spielberg" in second["inserted"] and second["trained"]


def test_many_sessions_play_at_once_and_one_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_SESSIONS", 8)
    with environment("search_r1") as port, ExitStack() as stack:
        clients = [stack.enter_context(connect(f"ws://127.0.0.1:{port}/ws")) for _ in range(9)]
        assert json.loads(clients.pop().recv(timeout=20))["data"]["code"] == "CAPACITY_REACHED"
        shown = [ask(client, "reset", question_id=QUESTIONS[i % 2].id) for i, client in enumerate(clients)]
        assert len({reply["data"]["observation"]["messages"][-1]["content"] for reply in shown}) == 2
        ends = [ask(client, "step", text="<answer>George Lucas</answer>")["data"] for client in clients]
        assert [end["reward"] for end in ends] == [0.0, 1.0] * 4


def test_a_silent_session_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with environment("search_r1") as port, connect(f"ws://127.0.0.1:{port}/ws") as client:
        assert json.loads(client.recv(timeout=20))["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(Exception, match="1000"):
            client.recv(timeout=20)


def test_a_reset_in_the_middle_begins_anew_and_bad_messages_are_answered() -> None:
    with environment("search_r1") as port, connect(f"ws://127.0.0.1:{port}/ws") as client:
        assert "reset" in ask(client, "step", text="a")["data"]["message"]
        ask(client, "reset", question_id="q1", episode_id="e1")
        ask(client, "step", text="<search>Jaws</search>")
        assert ask(client, "state")["data"] == {"episode_id": "e1", "step_count": 1, "question_id": "q1"}
        again = ask(client, "reset", question_id="q2")["data"]["observation"]
        assert "Star Wars" in again["messages"][-1]["content"] and not again["inserted"]
        assert "one of yours comes with golden_answers" in ask(client, "reset", question="Who?")["data"]["message"]
        assert ask(client, "step", words="a")["data"]["code"] == "VALIDATION_ERROR"
        assert "holds none" in ask(client, "reset", question="Who?", golden_answers=[" "])["data"]["message"]
        many = ask(client, "reset", question="Who?", golden_answers=["me"] * 10_001)
        assert many["data"]["code"] == "VALIDATION_ERROR"
        own = ask(client, "reset", question="Who?", golden_answers=["me"])["data"]["observation"]
        assert own["question_id"] == "Who?"
        assert ask(client, "step", text="<answer>me</answer>")["data"]["reward"] == 1.0


def test_a_question_that_could_be_another_one_is_refused() -> None:
    engine, reward = make("search_r1", CurrentPolicy())
    questions = [Question("1", "Who wrote A?", ("me",), "a"), Question("1", "Who wrote B?", ("you",), "b")]
    with (
        serving(EnvironmentApp(engine, reward, questions, ListenSettings())) as port,
        connect(f"ws://127.0.0.1:{port}/ws") as client,
    ):
        assert "give dataset and question_id" in ask(client, "reset", question_id="1")["data"]["message"]
        wrong = ask(client, "reset", dataset="a", question_id="1", question="Who wrote B?")
        assert "unknown question" in wrong["data"]["message"]
        shown = ask(client, "reset", dataset="a", question_id="1")["data"]["observation"]
        assert "Who wrote A?" in shown["messages"][-1]["content"]


def test_a_search_that_fails_ends_the_episode_without_a_reward() -> None:
    class Broken(ToyRetriever):
        async def search(self, queries: Any, top_k: int) -> Any:
            raise RetrievalError("gone", cause="connection")

    with environment("search_r1", Broken()) as port, connect(f"ws://127.0.0.1:{port}/ws") as client:
        ask(client, "reset")
        assert ask(client, "step", text="<search>Jaws</search>") == {
            "type": "error",
            "data": {"message": "gone", "code": "EXECUTION_ERROR"},
        }


def test_a_reward_that_asks_the_policy_asks_the_client() -> None:
    def verdict(prompt: Prompt, sampling: Sampling) -> str:
        return "<answer>False</answer>"

    form, prompts = FORMATS["hiprag"](PromptSet.find("brief")), PromptSet.find("brief")
    engine = Engine(CurrentPolicy(), ToyRetriever(), form)
    parts = RewardParts(form, judge=JudgeService(ScriptedLLM(verdict), prompts), policy=CurrentPolicy())
    reward = open_reward(RewardSettings(name="hiprag"), parts)
    with (
        serving(EnvironmentApp(engine, reward, QUESTIONS, ListenSettings())) as port,
        connect(f"ws://127.0.0.1:{port}/ws") as client,
    ):
        assert ask(client, "reset", question_id="q1")["data"]["observation"]["trained"]
        for text in ("I search.</reasoning><search>Jaws</search>", "Steven Spielberg</conclusion>"):
            assert ask(client, "step", text=text)["data"]["observation"]["trained"]
        data = ask(client, "step", text="</think><answer>Steven Spielberg</answer>")["data"]
        assert not data["done"] and not data["observation"]["trained"]
        data = ask(client, "step", text="I do not know.")["data"]
        assert data["done"] and data["reward"] == pytest.approx(1.4)  # the search was needed
