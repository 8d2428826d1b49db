from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import Interrupted, JudgeError, LLMError
from reasonrag.core.types import Completion
from reasonrag.formats import PromptSet
from reasonrag.rewards.judge import BOOLEAN, JudgeService, same_meaning, templates_fingerprint
from tests.fakes.scripted import ScriptedLLM

PROMPTS = PromptSet.find()
TRUE = "<answer>True</answer>"


class Gate:
    """An LLM that answers once it is let; counts who is inside."""

    name = "gate"

    def __init__(self) -> None:
        self.calls = self.inside = self.cancelled = 0
        self.open = asyncio.Event()

    async def complete(self, prompt, sampling):
        self.calls += 1
        self.inside += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
        return Completion(TRUE)

    async def aclose(self):
        pass


def outcome(service: JudgeService) -> str:
    """The cause under which one question fails."""
    with pytest.raises(JudgeError) as error:
        asyncio.run(same_meaning(service, "a", "b"))
    return error.value.cause


def test_what_cannot_be_read_is_asked_for_again_with_a_reminder_and_then_by_sampling():
    llm = ScriptedLLM(["?", "maybe", TRUE])
    service = JudgeService(llm, PROMPTS)
    assert asyncio.run(same_meaning(service, "a", "b")) is True
    first, second, third = (prompt.messages[1].content for prompt in llm.prompts)
    assert second == third == f"{first}\n\n{BOOLEAN.reminder}"
    assert [sampling.temperature for sampling in llm.samplings] == [0.0, 0.0, 1.0]
    assert len({sampling.seed for sampling in llm.samplings}) == 3


def test_a_judge_that_does_not_answer_is_unreachable():
    service = JudgeService(ScriptedLLM([LLMError("refused", cause="http_500")]), PROMPTS)
    assert outcome(service) == "unreachable"


def test_a_judge_that_refuses_says_once_why():
    service = JudgeService(ScriptedLLM([LLMError("no temperature", cause="refused")] * 2), PROMPTS)
    with capture_logs() as logs:
        assert [outcome(service) for _ in range(2)] == ["refused"] * 2
    assert [(line["event"][:30], line["error"]) for line in logs] == [
        ("the judge's server refuses a r", "no temperature")
    ]


def test_a_run_that_is_draining_is_no_failure_of_the_judge():
    service = JudgeService(ScriptedLLM([Interrupted("ctrl-c")]), PROMPTS)
    with pytest.raises(Interrupted):
        asyncio.run(same_meaning(service, "a", "b"))


def test_equal_content_is_an_equal_request_and_anything_else_another():
    llm = ScriptedLLM(lambda prompt, sampling: TRUE)

    async def ask():
        service = JudgeService(llm, PROMPTS)
        for fields in ({"A": "x"}, {"A": "x"}, {"A": "y"}):
            await service.ask("same_meaning", fields, BOOLEAN)
        await service.ask("step_holds", {"A": "x"}, BOOLEAN)

    asyncio.run(ask())
    requests = list(zip(llm.prompts, llm.samplings, strict=True))
    assert requests[0] == requests[1]
    assert len(set(requests)) == len({sampling.seed for sampling in llm.samplings}) == 3


def test_whoever_gives_up_takes_no_verdict_from_those_who_wait():
    async def ask():
        gate = Gate()
        service = JudgeService(gate, PROMPTS)
        first, second = (asyncio.create_task(same_meaning(service, "a", "b")) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        gate.open.set()
        assert await second is True and first.cancelled()
        return gate

    gate = asyncio.run(ask())
    assert (gate.calls, gate.cancelled) == (1, 0), "both wait for the same call"


def test_the_fingerprint_changes_with_any_template(tmp_path):
    folder = tmp_path / "judge"
    folder.mkdir()
    prints = set()
    for name, text in [("path", "a"), ("path", "b"), ("answer", "a")]:
        (folder / f"{name}.txt").write_text(text)
        prints.add(templates_fingerprint(PromptSet(tmp_path)))
    assert len(prints) == 3
