from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import ConfigError, JudgeError, RunError
from reasonrag.core.settings import validate
from reasonrag.core.types import Trajectory
from reasonrag.rewards import REWARDS, RewardSettings, open_reward
from reasonrag.rewards.batch import BatchReward
from tests.rewards.toys import parts, score, trajectory, values
from tests.toys import QUESTION


def said(answer: str, *, stray: str = "") -> Trajectory:
    search = f"{stray}<think>a film</think><search>director of Jaws</search>"
    return trajectory("search_r1", search, f"<think>found</think><answer>{answer}</answer>")


def reward(**outcome):
    return open_reward(validate(RewardSettings, {"outcome": outcome}), parts("search_r1"))


def test_search_r1_v03_values():
    """Right in form, right out of form, form alone, an answer alone, nothing."""
    right, wrong = "Steven Spielberg", "George Lucas"
    nothing = trajectory("search_r1", "<think>I give up</think>")
    batch = [said(right), said(right, stray="so"), said(wrong), said(wrong, stray="so"), nothing]
    assert values(score(reward(preset="search-r1-v0.3"), *batch)) == [1.0, 0.8, 0.2, 0.1, 0.0]


def test_the_metric_alone_without_weights():
    batch = [said("Steven Spielberg"), said("Spielberg"), said("it was Steven Spielberg")]
    assert values(score(reward(), *batch)) == [1.0, 0.0, 0.0]
    assert values(score(reward(metric="f1"), *batch)) == [1.0, round(2 / 3, 9), round(2 / 3, 9)]
    assert values(score(reward(metric="cem"), *batch)) == [1.0, 0.0, 1.0]


def test_spre_of_a_finished_trajectory():
    """Right in three steps, half right in three, right at once, wrong, and none at all (arXiv:2505.14069, eq. 1)."""
    spre = open_reward(validate(RewardSettings, {"name": "spre", "spre": {"alpha": 0.5}}), parts("reasonrag"))
    found = ("<query>who?</query>", "<evidence>He did.</evidence>")
    batch = [
        trajectory("reasonrag", *found, "<answer>Steven Spielberg</answer>"),
        trajectory("reasonrag", *found, "<answer>Spielberg</answer>"),
        trajectory("reasonrag", "<answer>Steven Spielberg</answer>"),
        trajectory("reasonrag", "<answer>George Lucas</answer>"),
        trajectory("reasonrag", "Steven Spielberg", max_steps=1),
    ]
    assert values(score(spre, *batch)) == [0.125, round(0.125 * 2 / 3, 9), 0.5, 0.0, 0.0]
    assert score(spre, batch[1])[0].parts["path"] == 0.125


def test_every_score_explains_itself():
    (found,) = score(reward(preset="search-r1-v0.3"), said("Spielberg"))
    assert found.value == 0.2
    assert found.parts == {
        "em": 0.0,
        "f1": pytest.approx(2 / 3),
        "cem": 0.0,
        "rc": 1.0,
        "well_formed": 1.0,
        "answer": 0.0,
        "format": 1.0,
        "answered": 1.0,
    }


def test_a_value_that_is_given_wins_over_the_preset():
    settings = validate(RewardSettings, {"outcome": {"preset": "search-r1-v0.3", "metric": "f1"}}).outcome
    assert (settings.metric, settings.format_weight, settings.answer_present) == ("f1", 0.2, 0.1)


def test_a_trajectory_that_has_not_ended_is_not_scored():
    (found,) = score(reward(), Trajectory(QUESTION))
    assert (found.value, found.cause) == (None, "unfinished")


class Broken(BatchReward):
    """Fails in the way that the answer names."""

    def __init__(self, settings, given):
        super().__init__(given)

    async def _value(self, read, step):
        match read.trajectory.answer:
            case "nan" | "inf" as name:
                return float(name)
            case "part":
                read.parts["bonus"] = float("inf")
            case "judge":
                raise JudgeError("?", cause="timeout")
            case "bug":
                raise KeyError("x")
            case "disk":
                raise RunError("full")
        return 1.0


def test_failures_are_scores_without_a_value_and_touch_no_other():
    ours = open_reward(RewardSettings(name=f"{__name__}:Broken"), parts("search_r1"))
    names = ["fine", "nan", "inf", "part", "judge", "bug"]
    found = score(ours, *(said(name) for name in names))
    assert [s.value for s in found] == [1.0, None, None, None, None, None]
    assert [s.cause for s in found] == ["", "not_finite", "not_finite", "not_finite", "timeout", "bug:KeyError"]
    assert found[3].parts["bonus"] is None
    assert ours.counts == {"not_finite": 3, "timeout": 1, "bug:KeyError": 1}
    assert all(s.parts["rc"] == 1.0 for s in found)


def test_what_the_user_has_to_mend_is_raised():
    ours = open_reward(RewardSettings(name=f"{__name__}:Broken"), parts("search_r1"))
    with pytest.raises(RunError, match="full"):
        score(ours, said("disk"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outcome": {"answer_present": 0.3, "format_weight": 0.2}}, "a malformed wrong answer would earn more"),
        ({"outcome": {"preset": "search-r1-v0.4"}}, "did you mean 'search-r1-v0.3'"),
        ({"when_to_search": {"no_stage_one": True, "no_stage_two": True}}, "leave no stage"),
        ({"when_to_search": {"rc_cap": 7}}, "a wrong answer would earn as much"),
        ({"when_to_search": {"rc_cap": 4}}, "is 1 or more: a wrong answer would earn as much"),
        ({"when_to_search": {"rc_cap": 7, "no_r_s": True}}, "is 2 or more: a wrong answer would earn as much"),
        ({"when_to_search": {"switch_step": -1}}, "never comes"),
        ({"hiprag": {"lambda_q": 0.4}}, "unknown key 'hiprag.lambda_q'; did you mean 'lambda_p'"),
        ({"hiprag": {"lambda_p": -0.1}}, "greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        validate(RewardSettings, given)


def test_without_r_s_more_retrievals_may_count():
    settings = validate(RewardSettings, {"when_to_search": {"rc_cap": 6, "no_r_s": True}})
    assert settings.when_to_search.rc_cap == 6
    assert validate(RewardSettings, {"when_to_search": {"rc_cap": 7, "eq10_as_printed": True}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hiprg", "did you mean 'hiprag'"),
        ("no.such:Reward", "cannot be imported"),
        ("hiprag", "name one, or set hiprag.lambda_p to 0"),
        ("search-p1", "asks a judge about every trajectory"),
    ],
)
def test_a_reward_that_cannot_be_opened_says_what_to_do(name, message):
    with pytest.raises(ConfigError, match=message):
        open_reward(RewardSettings(name=name), parts("hiprag"))


@pytest.mark.parametrize("track", ["self_track", "reference_track"])
def test_one_track_alone_needs_a_judge_and_neither_needs_none(track):
    off = {"self_track": False, "reference_track": False, "outcome": "binary"}
    with pytest.raises(ConfigError, match="asks a judge"):
        open_reward(
            validate(RewardSettings, {"name": "search-p1", "search_p1": off | {track: True}}), parts("search_p1")
        )
    open_reward(validate(RewardSettings, {"name": "search-p1", "search_p1": off}), parts("search_p1"))


def test_rewards_without_memory_have_no_state():
    ours = reward()
    ours.observe([], step=0)
    assert ours.state() == {}
    ours.restore({})
    assert sorted(REWARDS) == ["hiprag", "outcome", "prm", "search-p1", "spre", "when-to-search"]
    assert asyncio.run(ours.score([], step=0)) == []
