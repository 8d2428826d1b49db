"""Plain functions as rewards."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import ConfigError
from reasonrag.rewards import RewardSettings, open_reward
from reasonrag.rewards.base import COLUMNS, Reward
from tests.rewards.toys import RIGHT, parts, score, trajectory, values

HERE = "python:tests.rewards.test_functions"
SEEN: dict[str, object] = {}


def said(answer: str):
    return trajectory("search_r1", f"<think>hm</think><answer>{answer}</answer>")


def matches(completions, golden_answers, **kwargs):
    SEEN.clear()
    SEEN.update(kwargs, completions=completions, golden_answers=golden_answers)
    texts = [completion[0]["content"] for completion in completions]
    return [float(gold[0] in text) for text, gold in zip(texts, golden_answers, strict=True)]


async def matches_later(prompts, completions, answer):
    await asyncio.sleep(0)
    return [int(gold in completion[-1]["content"]) for completion, gold in zip(completions, answer, strict=True)]


def with_holes(completions):
    return [1.0, None, float("nan"), "high", float("inf")]


def raises(completions, **kwargs):
    raise KeyError("solution")


def one_for_all(completions):
    return [1.0]


def with_solution(completions, solution):
    return [0.0 for _ in solution]


def opened(name: str) -> Reward:
    return open_reward(RewardSettings(name=f"{HERE}:{name}"), parts("search_r1"))


@pytest.mark.parametrize("name", ["matches", "matches_later"])
def test_a_function_of_trls_convention_scores_a_batch(name):
    found = score(opened(name), said(RIGHT), said("Kubrick"))
    assert values(found) == [1.0, 0.0]
    assert found[0].parts["em"] == 1.0, "the common components explain it"


def test_a_function_that_takes_anything_is_given_every_column():
    score(opened("matches"), said(RIGHT), said("Kubrick"), step=7)
    assert sorted(SEEN) == sorted(COLUMNS)
    (message,) = SEEN["completions"][1]
    assert message == {"role": "assistant", "content": "<think>hm</think><answer>Kubrick</answer>"}
    assert [m["role"] for m in SEEN["prompts"][0]] == ["system", "user"]
    assert SEEN["answer"] == [RIGHT, RIGHT], "the first golden answer, not the policy's"
    assert [t.answer for t in SEEN["trajectories"]] == [RIGHT, "Kubrick"]
    assert SEEN["step"] == 7


def test_what_is_no_number_is_no_score_and_counted():
    reward = opened("with_holes")
    found = score(reward, *[said("x")] * 5)
    assert [(s.value, s.cause) for s in found] == [
        (1.0, ""),
        (None, "no_reward"),
        (None, "not_finite"),
        (None, "not_a_number"),
        (None, "not_finite"),
    ]


def test_a_function_that_raises_sets_its_batch_aside():
    reward = opened("raises")
    with capture_logs() as logs:
        for _ in range(2):
            assert [s.cause for s in score(reward, said("a"), said("b"))] == ["bug:KeyError"] * 2
    (line,) = logs  # the place in the user's file, once
    assert line["place"] == f"{__file__}:{raises.__code__.co_firstlineno + 1}" and "solution" in line["error"]


def test_a_function_that_does_not_return_one_reward_each_ends_the_run():
    with pytest.raises(ConfigError, match="returned 1 values for 2 completions"):
        score(opened("one_for_all"), said("a"), said("b"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("with_solution", "requires solution, .* with these keyword arguments: prompts, completions, question"),
        ("RIGHT", "cannot be called"),
    ],
)
def test_a_function_of_another_form_is_refused_before_anything_is_loaded(name, message):
    with pytest.raises(ConfigError, match=message):
        opened(name)


def test_functions_of_trl_work_as_they_are():
    pytest.importorskip("trl")
    reward = open_reward(RewardSettings(name="python:trl.rewards:think_format_reward"), parts("search_r1"))
    good = trajectory("search_r1", "<think>hm</think>\n<answer>a</answer>")
    assert values(score(reward, good, trajectory("search_r1", "<answer>a</answer>"))) == [1.0, 0.0]
