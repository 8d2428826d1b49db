"""Signs of a collapse, validation, and what survives a restart."""

from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Question
from reasonrag.formats import FORMATS
from reasonrag.online_rl import collector
from reasonrag.online_rl.collector import Validation, collapse, mean_metrics
from reasonrag.online_rl.settings import GuardSettings
from reasonrag.rewards import Score
from reasonrag.rollout import Engine
from tests.online_rl.test_collector import Says
from tests.online_rl.toys import Words
from tests.toys import ToyRetriever

QUESTIONS = [Question(str(n), f"What is {n}?", (str(n),), dataset="toy") for n in range(6)]


@pytest.fixture(autouse=True)
def windows_of_two(monkeypatch):
    monkeypatch.setattr(collector, "WINDOW", 2)


def stops(name: str, values: list[float], **limits: float) -> list[bool]:
    """Whether training is stopped after each batch, by what was logged so far."""
    settings = GuardSettings(**({"format_rate_drop": 0.0, "max_length_growth": 0.0} | limits))
    history = [{f"rollout/{name}": value} for value in values]
    return [bool(collapse([{"eval_em": 1.0}, *history[:batches]], settings)) for batches in range(1, len(values) + 1)]


def test_a_format_that_is_lost_stops_a_training_by_the_mean_of_a_window():
    values = [0.9, 0.9, 0.2, 0.9, 0.9, 0.5, 0.4]
    assert stops("format_rate", values, format_rate_drop=0.4) == [False] * 6 + [True], "one bad batch is none"


def test_a_format_that_was_never_there_cannot_be_lost():
    assert not any(stops("format_rate", [0.1, 0.0, 0.0, 0.0], format_rate_drop=0.4))


def test_trajectories_that_grow_stop_a_training():
    assert stops("tokens", [10, 10, 19, 20, 22], max_length_growth=2.0) == [False, False, False, False, True]


def validation(metric="em", say=lambda prompt, seed: "<think>t</think><answer>3</answer>", tell=lambda q, s, c: 1.0):
    engine = Engine(Words(say), ToyRetriever(), FORMATS["search_r1"](), max_steps=3)
    return Validation(QUESTIONS, engine, Says(tell), metric, 7)


def test_validation_gives_the_figures_of_every_question():
    found = asyncio.run(validation().run(0))
    assert mean_metrics(found)["em"] == pytest.approx(1 / 6)
    assert len(found) == 6 and "reward" not in found[0]


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
