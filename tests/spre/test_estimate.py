from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Answer, Completion, Prompt, Step, StopReason, Trajectory
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import JudgeEvaluator, PRMEvaluator, RolloutEvaluator, spre, trajectory_reward
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever


def test_eq_1_worked_example():
    # Two rollouts: right after 3 steps, half right after 5: (1 * 0.9**3 + 0.5 * 0.9**5) / 2.
    assert spre([1.0, 0.5], [3, 5], alpha=0.9) == pytest.approx((0.729 + 0.5 * 0.59049) / 2)


def test_spre_of_no_rollout_is_an_error_not_0():
    with pytest.raises(ValueError, match="undefined"):
        spre([], [], alpha=0.9)


def finished(answer: str | None, steps: int) -> Trajectory:
    step = Step(Prompt(()), Completion(""), Answer(answer or ""))
    return Trajectory(QUESTION, (step,) * steps, StopReason.ANSWERED if answer else None)


def test_reward_counts_every_action_from_the_root():
    assert trajectory_reward(finished("Steven Spielberg", 3), alpha=0.9) == pytest.approx(0.729)
    assert trajectory_reward(finished("Spielberg", 1), alpha=0.5) == pytest.approx(2 / 3 * 0.5)


def test_an_unfinished_trajectory_has_no_reward():
    assert trajectory_reward(finished(None, 3), alpha=0.9) is None


def evaluate(replies, trajectory=None, k=2, max_steps=3):
    engine = Engine(ScriptedLLM(replies), ToyRetriever(), ReasonRAGFormat(), max_steps=max_steps)
    return asyncio.run(RolloutEvaluator(engine, k=k, alpha=0.9).evaluate(trajectory or Trajectory(QUESTION), seed=0))


def test_rollouts_are_valued_by_eq_1_and_returned():
    evaluation = evaluate(["<answer>Steven Spielberg</answer>", "<answer>nobody</answer>"])
    assert evaluation.value == pytest.approx(0.45)
    assert sorted(evaluation.rollout_values) == [0.0, 0.9]
    assert len(evaluation.rollouts) == 2


def test_rollouts_without_an_answer_are_left_out_of_the_mean():
    evaluation = evaluate(lambda p, s: "nonsense", k=2)
    assert evaluation.value is None and evaluation.rollout_values == (None, None)


def judge(replies):
    return JudgeService(ScriptedLLM(replies), PromptSet.find())


def test_a_judge_that_cannot_be_read_gives_no_value_and_is_counted():
    process = judge(["?", "??", "???"])
    assert asyncio.run(JudgeEvaluator(process).evaluate(Trajectory(QUESTION), seed=0)).value is None


def test_another_seed_gives_other_rollouts():
    seen = []

    def reply(prompt, sampling):
        seen.append(sampling.seed)
        return "<answer>x</answer>"

    engine = Engine(ScriptedLLM(reply), ToyRetriever(), ReasonRAGFormat(), max_steps=3)
    for seed in (0, 1):
        asyncio.run(RolloutEvaluator(engine, k=2, alpha=0.9).evaluate(Trajectory(QUESTION), seed=seed))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("value", [3.7, -0.1, float("nan")])
def test_a_value_of_a_users_scorer_that_is_none_is_an_error(value):
    class Scorer:
        name = "mine"

        async def score(self, steps):
            return [value for _ in steps]

    step = Step(Prompt(()), Completion("text"), Answer("x"))
    with pytest.raises(LLMError, match=r"mine values a step at .*; values are in \[0, 1\]"):
        asyncio.run(PRMEvaluator(Scorer()).evaluate(Trajectory(QUESTION, (step,)), seed=0))
