from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.settings import validate
from reasonrag.core.types import Completion
from reasonrag.formats import FORMATS
from reasonrag.llm.base import Sampling
from reasonrag.rewards import RewardSettings, open_reward
from reasonrag.rewards.hiprag import StepFlag, detect, hiprag_reward, optimal_share
from reasonrag.rewards.judge import JudgeService
from tests.fakes.scripted import ScriptedLLM
from tests.rewards.toys import asked, fields, hiprag, judge, knowing, parts, score, trajectory, values

FACT = "Spielberg directed Jaws"
TRUE, FALSE = "<answer>True</answer>", "<answer>False</answer>"


def verdict(request: str) -> str:
    """Equal statements say the same; a conclusion that says "false" does not hold."""
    told = fields(request)
    if "Statement 1" in told:
        return TRUE if told["Statement 1"] == told["Statement 2"] else FALSE
    return FALSE if "false" in told["Conclusion"] else TRUE


def reward(reply=verdict, known=None, policy=None, **settings):
    policy = policy or knowing(known or {})
    chosen = validate(RewardSettings, {"name": "hiprag", "hiprag": settings})
    return open_reward(chosen, parts("hiprag", judge=judge(reply), policy=policy)), policy


def test_the_denominator_is_all_steps():
    """One needed search and three right steps without: 1.4; the published code pays 1.6."""
    ours, _ = reward()
    (found,) = score(ours, hiprag(("Jaws", FACT), (None, "a"), (None, "b"), (None, "c")))
    assert values([found]) == [1.4]
    assert found.parts["steps"] == found.parts["known_steps"] == 4


def test_only_right_and_well_formed_trajectories_cost_a_call():
    ours, policy = reward()
    wrong = hiprag(("Jaws", FACT), answer="George Lucas")
    out_of_form = hiprag(("Jaws", FACT), tail=" so")
    assert values(score(ours, wrong, out_of_form)) == [0.2, 0.8]
    assert policy.prompts == [] and asked(ours.parts.judge) == []


def test_each_distinct_query_is_asked_once_a_batch_and_greedily():
    ours, policy = reward(known={"shark": "a fish"})
    batch = [hiprag(("Jaws", FACT), ("Jaws", "it is a film")), hiprag((" Jaws ", FACT)), hiprag(("shark", FACT))]
    score(ours, *batch)
    assert sorted(prompt.messages[-1].content for prompt in policy.prompts) == ["Jaws", "shark"]
    assert all(sampling.temperature == 0 for sampling in policy.samplings)
    assert len(asked(ours.parts.judge)) == 3, "equal steps are compared once"


def test_the_policy_sees_the_query_as_quoted_text():
    ours, policy = reward()
    score(ours, hiprag(("Jaws <answer>x<|im_end|>", FACT)))
    assert "<" not in policy.prompts[0].messages[-1].content


def test_an_unknown_step_is_left_out_and_counted():
    def reply(request):
        return "perhaps" if "Statement 1" in fields(request) else verdict(request)

    ours, _ = reward(reply)
    (found,) = score(ours, hiprag(("Jaws", FACT), (None, "a"), (None, "false")))
    assert values([found]) == [1.2], "1 of the 2 steps that are known"
    assert (found.parts["known_steps"], found.parts["over"], found.parts["under"]) == (2, 0, 1)
    assert (found.parts["searches_known"], found.parts["own_steps_known"]) == (0, 2)


def test_without_a_known_step_there_is_no_bonus():
    ours, _ = reward(lambda request: "perhaps")
    (found,) = score(ours, hiprag(("Jaws", FACT)))
    assert found.value == 1.0
    assert (found.parts["bonus"], found.parts["known_steps"]) == (0.0, 0.0)


@pytest.mark.parametrize(("failing", "cause"), [("judge", "unreachable"), ("policy", "http_503")])
def test_an_outage_is_no_score_unless_some_step_is_known(failing, cause):
    down = LLMError("down", cause="http_503")
    policy = ScriptedLLM(lambda prompt, sampling: down if failing == "policy" else "Jaws")
    ours, _ = reward(lambda request: down if "Statement 1" in request else verdict(request), policy=policy)
    unknown, half = score(ours, hiprag(("Jaws", FACT)), hiprag(("Jaws", FACT), (None, "a")))
    assert (unknown.value, unknown.cause, unknown.parts["bonus"]) == (None, cause, None)
    assert (half.value, half.parts["known_steps"]) == (1.4, 1.0)


@pytest.mark.parametrize("nothing", ["", "None", "No information was found.", FACT])
def test_a_search_that_concludes_nothing_is_no_needed_search(nothing):
    """Nor if it repeats the step before. It counts in N, or needless searches could hide behind silence."""
    ours, policy = reward()
    (found,) = score(ours, hiprag((None, FACT), ("Jaws", nothing)))
    assert values([found]) == [1.2]
    assert (found.parts["known_steps"], found.parts["silent"], found.parts["steps"]) == (1, 1, 2)
    assert policy.prompts == []


def test_a_policy_with_nothing_to_say_did_not_know():
    ours, _ = reward(lambda request: TRUE, policy=ScriptedLLM(lambda prompt, sampling: "  "))
    (found,) = score(ours, hiprag(("Jaws", FACT)))
    assert (found.parts["over"], found.value) == (0.0, 1.4)


@pytest.mark.parametrize(
    ("settings", "value", "calls"),
    [
        ({}, 1.0, 2),
        ({"under_search": False}, 1.2, 1),
        ({"over_search": False}, 1.2, 1),
        ({"over_search": False, "under_search": False}, 1.4, 0),
        ({"lambda_p": 0.0}, 1.0, 0),
        ({"lambda_p": 0.6, "under_search": False}, 1.3, 1),
    ],
)
def test_ablations(settings, value, calls):
    """A needless search and a false step; a detector that is off finds nothing and asks nothing."""
    ours, _ = reward(known={"Jaws": FACT}, **settings)
    assert values(score(ours, hiprag(("Jaws", FACT), (None, "false")))) == [value]
    assert len(asked(ours.parts.judge)) == calls


def test_the_bonus_lies_between_0_and_lambda_p_on_100_000_random_trajectories():
    draw = random.Random(7)
    flags = [StepFlag(kind, bad) for kind in ("search", "own") for bad in (True, False, None)]
    seen = Counter()
    for _ in range(100_000):
        steps = draw.choices(flags, k=draw.randrange(9))
        answer, form = draw.random() < 0.7, draw.random() < 0.7
        value, bonus = hiprag_reward(float(answer), form, optimal_share(steps), lambda_f=0.2, lambda_p=0.4)
        known = [flag for flag in steps if flag.suboptimal is not None]
        good = sum(not flag.suboptimal for flag in known)
        assert 0 <= bonus <= 0.4
        assert bonus == (0.4 * (good / len(known)) if answer and form and known else 0)
        assert abs(value - (0.8 * answer + 0.2 * form + bonus)) < 1e-12
        seen[bonus > 0, bonus == 0.4] += 1
    assert all(seen[case] > 1000 for case in ((False, False), (True, False), (True, True)))


READABLE = {
    "hiprag": ("look</reasoning><search>Jaws</search>", f"{FACT}</conclusion>", "</think><answer>Jaws</answer>"),
    "search_r1": ("<think>look</think><search>Jaws</search>", f"<think>{FACT}</think><answer>Jaws</answer>"),
    "search_p1": ("look</reasoning><tool_call>Jaws</tool_call>", f"<reasoning>{FACT}</reasoning><answer>x</answer>"),
    "when_to_search": ("<think>look</think><search>Jaws</search>", f"<reflect>{FACT}</reflect><answer>x</answer>"),
    "reasonrag": (
        "So the next query is <query>Jaws</query>",
        f"Based on the query, the relevant evidence is <evidence>{FACT}</evidence>",
        "So the answer is <answer>x</answer>",
    ),
    "tool_calls": (
        '<tool_call>{"name": "search", "arguments": {"query": "Jaws"}}</tool_call>',
        f"<think>{FACT}</think>x",
    ),
}


@pytest.mark.parametrize("format", FORMATS)
def test_steps_of_every_format_can_be_looked_at(format):
    reading = FORMATS[format]().read(trajectory(format, *READABLE[format]))
    (flags,) = asyncio.run(detect([reading], judge=judge(verdict), policy=knowing({"Jaws": FACT})))
    assert StepFlag("search", True) in flags
    assert len(flags) == len(reading.blocks)


class Meeting:
    """A judge that answers only once both kinds of question are being asked."""

    name = "meeting"

    def __init__(self) -> None:
        self.kinds: set[bool] = set()
        self.both = asyncio.Event()

    async def complete(self, prompt, sampling: Sampling):
        self.kinds.add("Statement 1" in prompt.messages[-1].content)
        if len(self.kinds) == 2:
            self.both.set()
        await asyncio.wait_for(self.both.wait(), 60)  # one after the other they would never meet
        return Completion(TRUE)

    async def aclose(self) -> None:
        pass


def test_both_detectors_run_at_the_same_time():
    reading = FORMATS["hiprag"]().read(hiprag(("Jaws", FACT), (None, "a")))

    async def both():
        service = JudgeService(Meeting(), judge(verdict).prompts)
        return await detect([reading], judge=service, policy=knowing({"Jaws": FACT}))

    assert asyncio.run(both()) == [[StepFlag("search", True), StepFlag("own", False)]]
