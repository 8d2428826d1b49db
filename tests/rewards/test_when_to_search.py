from __future__ import annotations

import itertools
import json
import math

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.settings import validate
from reasonrag.retrieval.encoders import LexicalEncoder
from reasonrag.rewards import RewardSettings, open_reward
from reasonrag.rewards.answers import JudgeOutcome
from reasonrag.rewards.base import Score
from reasonrag.rewards.when_to_search import (
    RiseDetector,
    answer_reward_1,
    answer_reward_2,
    is_concise,
    search_reward,
    when_to_search_reward,
)
from tests.rewards.toys import asked, fields, judge, parts, score, trajectory, values, when_to_search

STAGES = (answer_reward_1, answer_reward_2)
WRONG = "George Lucas"


def reward(encoder=None, service=None, **settings):
    chosen = validate(RewardSettings, {"name": "when-to-search", "when_to_search": {"switch_step": 100} | settings})
    outcome = None if service is None else JudgeOutcome(service)
    return open_reward(chosen, parts("when_to_search", encoder=encoder or LexicalEncoder(), outcome=outcome))


def switching(**detector):
    ours = reward(switch_step="auto")
    ours._retrievals = RiseDetector(**detector)
    return ours


class Vectors:
    """An encoder that knows some texts, or fails."""

    def __init__(self, vectors, failure=None):
        self.vectors, self.failure = vectors, failure
        self.calls = []

    async def encode(self, texts):
        self.calls.append(list(texts))
        if self.failure:
            raise self.failure
        return [self.vectors[text] for text in texts]


def test_scores_of_both_stages_by_hand():
    ours = reward(no_r_s=True)
    batch = [when_to_search("Jaws"), when_to_search("Jaws", "shark", answer=WRONG), when_to_search()]
    assert values(score(ours, *batch, step=99)) == [2.0, 0.6, 2.0]  # 1; -1 + 0.6; 1; and 1 for the form
    assert values(score(ours, *batch, step=100)) == [1.7, 0.0, 2.0]  # 1 - 0.3; -1; 1


def test_every_score_explains_itself():
    encoder = Vectors({"Jaws": [1.0, 0.0], "shark": [3.0, 4.0]})
    (found,) = score(reward(encoder), when_to_search("Jaws", "shark", answer=WRONG, stray="so"))
    assert values([found]) == [-2.0]  # -1 + 0.6, -0.6 for the likeness, -1 for the form
    assert {name: part if part is None else round(part, 9) for name, part in found.parts.items()} == {
        "em": 0.0,
        "f1": 0.0,
        "cem": 0.0,
        "rc": 2.0,
        "well_formed": 0.0,
        "correct": 0.0,
        "r_a": -0.4,
        "r_s": -0.6,
        "r_f": -1.0,
        "stage": 1.0,
        "concise": None,
        "avg_sim": 0.6,
    }


@pytest.mark.parametrize(
    ("queries", "r_s"),
    [
        ((), 0.0),
        (("director of Jaws",), 0.0),
        (("Who directed Jaws?",), -1.0),
        (("Jaws film", "Jaws film"), -1.0),
        (("Jaws film", "shark books"), 0.0),
        (("Who directed Jaws?", "shark books"), 0.0),  # eq. 9 asks for conciseness up to one retrieval only
        (("Jaws film", "Jaws shark"), -0.5),
        (("Jaws", "Jaws", "shark"), -1 / 3),
    ],
)
def test_r_s_with_counts_of_words(queries, r_s):
    (found,) = score(reward(), when_to_search(*queries))
    assert found.parts["r_s"] == pytest.approx(r_s)


@pytest.mark.parametrize(
    ("query", "concise"),
    [
        ("Jaws", True),
        ("birthplace Steven Spielberg", True),
        ("capital of France", True),
        ("U.S. Navy founder", True),
        ("What is Jaws", False),
        ("who's Spielberg", False),
        ("“How” Jaws ended", False),
        ("the film", False),
        ("the birthplace of the director of the film Jaws", False),
        ("WHICH film", False),
        ("Whichever film won", True),
        ("", False),
        ("... --", False),
    ],
)
def test_concise_queries(query, concise):
    assert is_concise(query) is concise


def sums(correct, worth, r_f):
    """Every r_sum: RC 0 to 20, concise or not, likeness from 0 to 1."""
    for rc, concise, tenth in itertools.product(range(21), (True, False), range(11)):
        yield when_to_search_reward(worth(correct, rc), search_reward(concise, rc, tenth / 10), r_f)


@pytest.mark.parametrize("worth", STAGES)
def test_of_equal_form_a_right_answer_is_worth_at_least_a_tenth_more_than_any_wrong_one(worth):
    for r_f in (1.0, -1.0):
        assert min(sums(True, worth, r_f)) - max(sums(False, worth, r_f)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"switch_step": 3}, [1, 1, 2, 2]),
        ({"switch_step": 0}, [2, 2, 2, 2]),
        ({"switch_step": 3, "stages": "two"}, [2, 2, 2, 2]),
        ({"switch_step": 3, "stages": "one"}, [1, 1, 1, 1]),
        ({"switch_step": "auto", "stages": "one"}, [1, 1, 1, 1]),
    ],
)
def test_stage_by_step(settings, stages):
    assert [reward(**settings).stage(step) for step in (0, 2, 3, 1000)] == stages


def tell(ours, rcs, first=0):
    for step, rc in enumerate(rcs, first):
        ours.observe([Score(1.0, {"rc": rc - 0.5}), Score(None, {"rc": rc + 0.5}), Score(None)], step=step)


RISING, FLAT = [0.1 * n for n in range(10)], [1.0] * 10


def test_auto_switches_once_retrievals_have_stopped_rising():
    """Windows of 3: the last three steps are flat, and the three before them, after step 15."""
    ours = switching(window=3, min_rise=0.01)
    stages = []
    for step, rc in enumerate(RISING + FLAT):
        stages.append(ours.stage(step))
        tell(ours, [rc], first=step)
    assert stages == [1] * 16 + [2] * 4
    tell(ours, [5.0] * 10, first=20)
    assert ours.stage(30) == 2, "it does not go back"


def test_auto_goes_on_after_a_restart_as_if_there_had_been_none():
    def fresh():
        return switching(window=3, min_rise=0.01)

    whole = fresh()
    tell(whole, RISING + FLAT)
    for cut in range(20):
        before, after = fresh(), fresh()
        tell(before, (RISING + FLAT)[:cut])
        after.restore(json.loads(json.dumps(before.state())))
        again = max(cut - 2, 0)  # the last steps are done again after a restart
        tell(after, (RISING + FLAT)[again:], first=again)
        assert after.state() == whole.state()
        assert after.stage(20) == 2


def test_the_unified_reward_of_table_2_has_both_terms_at_every_step():
    ours = reward(stages="unified", no_r_s=True)
    batch = [when_to_search("Jaws"), when_to_search("Jaws", "shark", answer=WRONG), when_to_search()]
    for step in (0, 99, 100, 10_000):
        found = score(ours, *batch, step=step)
        assert values(found) == [1.7, 0.6, 2.0]  # 1 - 0.3; -1 + 0.6; 1; and 1 for the form
        assert {each.parts["stage"] for each in found} == {0.0}
    (without,) = score(reward(no_r_a=True, no_r_s=True), when_to_search("Jaws", answer=WRONG))
    assert (without.value, without.parts["correct"], without.parts["r_a"]) == (1.0, 0.0, 0.0), "the form alone"


def test_a_judge_can_tell_what_is_correct():
    close = when_to_search("Jaws", answer="the great Steven Spielberg")
    assert score(reward(), close)[0].parts["correct"] == 0.0
    service = judge(lambda request: "YES" if "Spielberg" in fields(request)["Prediction"] else "NO")
    ours = reward(service=service)
    nothing = trajectory("when_to_search", "<think>I give up</think>")
    found = score(ours, close, when_to_search("Jaws", answer=WRONG), nothing)
    assert [s.parts["correct"] for s in found] == [1.0, 0.0, 0.0]
    assert len(asked(service)) == 2, "without an answer there is nothing to ask"


@pytest.mark.parametrize(("reply", "cause"), [(LLMError("down"), "unreachable"), ("perhaps", "unreadable")])
def test_a_judge_that_fails_gives_no_score(reply, cause):
    ours = reward(service=judge(lambda request: reply))
    (found,) = score(ours, when_to_search("Jaws"))
    assert (found.value, found.cause, found.parts["em"], found.parts["grade"]) == (None, cause, 1.0, None)


@pytest.mark.parametrize(
    ("encoder", "cause"),
    [
        (Vectors({}, LLMError("down", cause="http_503")), "http_503"),
        (Vectors({}), "bug:KeyError"),
        (Vectors({"Jaws": [math.nan], "shark": [1.0]}), "not_finite"),
        (Vectors({"Jaws": [1.0], "shark": [1.0, 2.0]}), "bug:ValueError"),
    ],
)
def test_an_encoder_that_fails_touches_only_those_who_need_it(encoder, cause):
    found = score(reward(encoder), when_to_search("Jaws"), when_to_search("Jaws", "shark"), when_to_search())
    assert [s.cause for s in found] == ["", cause, ""]
    assert [s.value is None for s in found] == [False, True, False]
