"""Signs of a collapse, validation, and what survives a restart."""

from __future__ import annotations

import asyncio
import json

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Question
from reasonrag.formats import FORMATS
from reasonrag.online_rl.monitoring import Guards, Monitor, Validation, mean_metrics, validation_engine
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.rewards import Score
from reasonrag.rollout import Engine
from tests.online_rl.test_collector import Says
from tests.online_rl.toys import Words
from tests.toys import ToyRetriever

QUESTIONS = [Question(str(n), f"What is {n}?", (str(n),), dataset="toy") for n in range(6)]


def guards(**wanted) -> Guards:
    watching = Guards(GuardSettings(**({"format_rate_drop": 0.0, "max_length_growth": 0.0} | wanted)))
    watching.window = 2
    return watching


def looks(watcher: Guards, name: str, values: list[float]) -> list[bool]:
    return [bool(watcher.update({f"rollout/{name}": value})) for value in values]


def test_a_format_that_is_lost_stops_a_training_by_the_mean_of_a_window():
    wary = guards(format_rate_drop=0.4)
    assert looks(wary, "format_rate", [0.9, 0.9, 0.2, 0.9, 0.9]) == [False] * 5, "one bad batch is none"
    assert looks(wary, "format_rate", [0.5, 0.4]) == [False, True]
    assert wary.best_format == pytest.approx(0.9)


def test_a_format_that_was_never_there_cannot_be_lost():
    assert not any(looks(guards(format_rate_drop=0.4), "format_rate", [0.1, 0.0, 0.0, 0.0]))


def test_trajectories_that_grow_stop_a_training():
    assert looks(guards(max_length_growth=2.0), "tokens", [10, 10, 19, 20, 22]) == [False, False, False, False, True]


def test_guards_go_on_where_they_were():
    once, before = guards(format_rate_drop=0.4), guards(format_rate_drop=0.4)
    looks(once, "format_rate", [0.9, 0.9, 0.5])
    looks(before, "format_rate", [0.9, 0.9, 0.5])
    after = guards(format_rate_drop=0.4)
    after.restore(json.loads(json.dumps(before.state())))
    assert looks(once, "format_rate", [0.3]) == looks(after, "format_rate", [0.3]) == [True]


def validation(metric="em", say=lambda prompt, seed: "<think>t</think><answer>3</answer>", tell=lambda q, s, c: 1.0):
    engine = Engine(Words(say), ToyRetriever(), FORMATS["search_r1"](), max_steps=3)
    return Validation(QUESTIONS, engine, Says(tell), metric, 7)


def test_validation_gives_the_figures_of_every_question():
    found = asyncio.run(validation().run(0))
    assert mean_metrics(found)["em"] == pytest.approx(1 / 6)
    assert len(found) == 6 and "reward" not in found[0]


def test_processes_share_the_held_out_questions():
    whole = asyncio.run(validation().run(0))
    shares = [asyncio.run(validation().run(0, process=p, processes=2)) for p in range(2)]
    assert mean_metrics(shares[0] + shares[1]) == mean_metrics(whole)


def test_a_question_that_does_not_fit_is_left_out_of_validation():
    def say(prompt, seed):
        if "What is 2" in prompt.messages[-1].content:
            return LLMError("too long", cause="context_overflow")
        return "<think>t</think><answer>3</answer>"

    assert len(asyncio.run(validation(say=say).run(0))) == 5


def test_the_reward_chooses_if_asked_and_missing_ones_are_left_out():
    some = validation("reward", tell=lambda q, s, c: Score(None, cause="timeout") if q < 3 else float(q))
    means = mean_metrics(asyncio.run(some.run(0)))
    assert means["reward"] == pytest.approx(4.0)


def test_the_best_is_the_first_of_equals():
    watcher = validation()
    assert [watcher.is_best({"em": em}, step) for step, em in enumerate([0.1, 0.3, 0.3, 0.2, 0.4])] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert (watcher.best, watcher.best_step) == (0.4, 4)
    assert not watcher.is_best({"f1": 1.0}, 5)


def test_validation_is_asked_as_evaluation_is():
    engine = validation_engine(validation().engine, temperature=0.0)
    assert (engine.sampling.temperature, engine.sampling.top_p) == (0.0, 1.0)


def test_validation_can_search_elsewhere():
    elsewhere = ToyRetriever()
    assert validation_engine(validation().engine, temperature=0.0, retriever=elsewhere).retriever is elsewhere


def test_the_best_by_another_metric_or_on_other_questions_is_forgotten():
    before = validation()
    before.is_best({"em": 0.25}, 5)
    state = json.loads(json.dumps(before.state()))
    same, metric, questions, hot = validation(), validation("f1"), validation(), validation()
    questions.questions = QUESTIONS[:5]
    hot.engine = validation_engine(hot.engine, temperature=0.5)
    for changed in (same, metric, questions, hot):
        changed.is_best({changed.metric: 0.1}, 2)
        changed.restore(state)
    assert (same.best, same.best_step) == (0.25, 5)
    assert [(changed.best, changed.best_step) for changed in (metric, questions, hot)] == [(None, None)] * 3
    assert metric.is_best({"f1": 0.01}, 6)


def test_all_of_it_survives_a_restart(tmp_path):
    before = Monitor(guards(), validation(), Says(lambda q, s, c: 1.0), 5)
    before.reward.seen = [1, 2]
    before.validation.is_best({"em": 0.25}, 5)
    before.save(tmp_path)
    after = Monitor(guards(), validation(), Says(lambda q, s, c: 1.0), 5)
    after.restore(tmp_path)
    assert (after.validation.best, after.validation.best_step, after.reward.seen) == (0.25, 5, [1, 2])


def test_equal_rewards_are_said_at_once_and_then_now_and_then():
    monitor = Monitor(guards(), None, Words(lambda trajectory: 0.0), 0)
    said = []
    for flat in [0.5] + 12 * [1.0] + [0.0, 1.0]:
        monitor.metrics = {"rollout/flat_groups": flat, "rollout/format_rate": 0.25}
        said.append(monitor.equal_rewards([0.0, 0.0, None] if len(said) < 14 else [0.0, 0.0, 1.0, 1.0]))
    assert [n for n, line in enumerate(said) if line] == [1, 11, 14]
    assert said[1].startswith("the rewards of every group are equal (all 0; 25% in form): there is nothing to learn")
    assert "in form), 11 steps in a row: " in said[11]
    assert "(from 0 to 1, alike in each group; " in said[14]
