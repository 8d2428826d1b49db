from __future__ import annotations

import json
import random

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.settings import validate
from reasonrag.rewards import RewardSettings, open_reward
from reasonrag.rewards.judge import ACCURACY_SCORES, PLANNER_SCORES, REASONING_SCORES, ReferencePlan
from reasonrag.rewards.search_p1 import (
    outcome_score,
    path_reward,
    reference_alignment,
    search_p1_format,
    search_p1_reward,
    self_consistency,
)
from tests.rewards.toys import asked, fields, judge, parts, score, search_p1, trajectory, values

PLANS = {("toy", "q1"): ReferencePlan("find the director", ("director of Jaws", "check it"))}


def evaluation(planner=1.0, plan=2, own=1, ref=2, accuracy=0.5, reasoning=0.8):
    names = ("planner_score", "model_plan_steps", "effective_steps_self", "effective_steps_ref")
    told = dict(zip(names, (planner, plan, own, ref), strict=True))
    return json.dumps(told | {"outcome_accuracy_score": accuracy, "outcome_reasoning_score": reasoning})


def reward(reply=None, plans=PLANS, **settings):
    service = judge(lambda request: evaluation() if reply is None else reply)
    chosen = validate(RewardSettings, {"name": "search-p1", "search_p1": settings})
    return open_reward(chosen, parts("search_p1", judge=service, plans=plans)), service


def test_a_wrong_answer_by_hand():
    """S_self 1 * 1/2 * 1/2, S_ref 2/2 * 2/2, so path 1; outcome 0.8 * 0.5 + 0.2 * 0.8: 0.3 + 0.336 + 0.1."""
    ours, _ = reward()
    (found,) = score(ours, search_p1("Jaws", "director of Jaws", answer="George Lucas"))
    assert values([found]) == [0.736]
    assert {name: round(part, 9) for name, part in found.parts.items()} == {
        "em": 0.0,
        "f1": 0.0,
        "cem": 0.0,
        "rc": 2.0,
        "well_formed": 1.0,
        "correct": 0.0,
        "n_actions": 2.0,
        "format": 1.0,
        "plan_missing": 0.0,
        "n_reference": 2.0,
        "planner": 1.0,
        "n_plan": 2.0,
        "n_self": 1.0,
        "n_ref": 2.0,
        "accuracy": 0.5,
        "reasoning": 0.8,
        "s_self": 0.25,
        "s_ref": 1.0,
        "path": 1.0,
        "outcome": 0.56,
    }


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        ({}, 1.0, 0.736),  # 0.3 * 1 + 0.6 + 0.1
        ({"reference_track": False}, 0.775, 0.511),  # path 0.25
        ({"self_track": False}, 1.0, 0.736),
        ({"self_track": False, "reference_track": False}, 0.7, 0.436),
        ({"outcome": "binary"}, 1.0, 0.4),
        ({"format": "none"}, 0.9, 0.636),
        ({"lambda_p": 0.4, "lambda_a": 1.0, "alpha": 0.5}, 1.5, 1.15),  # outcome 0.25 + 0.4
    ],
)
def test_ablations_and_weights(settings, right, wrong):
    ours, _ = reward(**settings)
    queries = ("Jaws", "director of Jaws")
    assert values(score(ours, search_p1(*queries), search_p1(*queries, answer="George Lucas"))) == [right, wrong]


def test_the_evaluator_sees_the_trajectory_with_what_was_found_and_the_plan():
    ours, service = reward()
    score(ours, search_p1("Jaws"))
    (request,) = asked(service)
    told = fields(request)
    assert told["Reference planner"] == "find the director"
    assert "1. director of Jaws\n2. check it" in request
    assert "‹reasoning>1. look 2. answer‹/reasoning>" in request
    assert "Jaws is a film directed by Steven Spielberg." in request
    assert "‹answer>Steven Spielberg‹/answer>" in request
    assert "<" not in request


def test_an_invalid_trajectory_is_worth_0_and_costs_no_call():
    ours, service = reward()
    no_search, no_answer = search_p1(), trajectory("search_p1", "I give up</reasoning>")
    assert values(score(ours, no_search, no_answer)) == [0.0, 0.0]
    assert asked(service) == []
    assert score(ours, no_search)[0].parts["format"] is None


@pytest.mark.parametrize(("format", "value"), [("soft", 0.95), ("strict", 0.0), ("none", 0.9)])
def test_what_is_out_of_form_with_a_search_and_an_answer(format, value):
    """0.3 + 0.6 and half of the form's 0.1; nothing at all; no form."""
    ours, service = reward(format=format)
    (found,) = score(ours, search_p1("Jaws", "director of Jaws", stray="so "))
    assert values([found]) == [value]
    assert len(asked(service)) == (0 if format == "strict" else 1)


def test_without_a_reference_plan_the_own_track_is_left_and_it_is_counted():
    ours, _ = reward(evaluation(ref=0), plans={})
    (found,) = score(ours, search_p1("Jaws", "director of Jaws"))
    assert values([found]) == [0.775]
    assert (found.parts["plan_missing"], found.parts["s_ref"], found.parts["path"]) == (1.0, None, 0.25)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("no JSON", "unreadable"),
        (evaluation(planner=0.9), "unreadable"),
        (LLMError("down"), "unreachable"),
        (evaluation(accuracy=float("nan")), "unreadable"),
    ],
)
def test_a_judge_that_fails_gives_no_score(reply, cause):
    ours, _ = reward(reply)
    (found,) = score(ours, search_p1("Jaws"))
    assert (found.value, found.cause) == (None, cause)
    assert found.parts["em"] == found.parts["format"] == 1.0


@pytest.mark.parametrize(
    ("value", "by_hand"),
    [
        (self_consistency(1.2, 3, 3, 3), 1.2),
        (self_consistency(0.6, 1, 3, 2), 0.6 / 3 / 2),
        (self_consistency(1.0, 1, 0, 2), 0.0),
        (self_consistency(1.0, 1, 2, 0), 0.0),
        (self_consistency(1.0, 9, 2, 2), 1.0),  # more than were planned cannot have been carried out
        (self_consistency(0.2, 2, 2, 1), 0.4),  # one search carried out both steps
        (reference_alignment(1, 4, 5), 1 / 4 / 5),
        (reference_alignment(3, 0, 5), 0.0),
        (path_reward(self_consistency(1.2, 4, 4, 1), None), 1.2),
        (outcome_score(False, 0.0, 1.0), 0.2),
        (outcome_score(False, 1.0, 1.0), 1.0),
    ],
)
def test_equations_6_to_8(value, by_hand):
    assert value == pytest.approx(by_hand)


def test_the_total_lies_in_its_range_on_50_000_random_verdicts():
    """0 where invalid; else from 0.05, the soft form alone, to 0.3 * 1.2 + 0.6 + 0.1."""
    draw = random.Random(7)
    lowest, highest, invalid = 1.0, 0.0, 0
    for _ in range(50_000):
        planned, reference, actions = draw.randrange(6), draw.randrange(6), draw.randrange(6)
        own = self_consistency(draw.choice(PLANNER_SCORES), draw.randrange(9), planned, actions)
        ref = reference_alignment(draw.randrange(9), reference, actions)
        path = path_reward(own, draw.choice((None, ref)))
        outcome = outcome_score(draw.random() < 0.3, draw.choice(ACCURACY_SCORES), draw.choice(REASONING_SCORES))
        assert 0 <= path <= 1.2
        assert 0 <= outcome <= 1
        well_formed, answered, responded = (draw.random() < 0.7 for _ in range(3))
        form = search_p1_format(well_formed, answered, actions > 0, responded, strictness="soft")
        total = search_p1_reward(path, outcome, form)
        if form is None:
            assert total == 0
            invalid += 1
        else:
            lowest, highest = min(lowest, total), max(highest, total)
    assert lowest == pytest.approx(0.05)
    assert highest == pytest.approx(1.06)
    assert invalid > 5_000
