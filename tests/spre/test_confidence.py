from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest

from reasonrag.spre.decisions import Decision, confidence, standard_error

ANSWER = Decision(("answer", "a"), 1, (1,), 0.5, ends=(0.5,), known=True)


def query(*ends):
    return Decision(("query", "q"), 1, (2,), sum(ends) / len(ends), ends=ends)


def test_answers_are_certain_and_one_trajectory_is_not():
    better = Decision(("answer", "b"), 1, (3,), 1.0, ends=(1.0, 1.0), known=True)
    assert confidence(better, ANSWER) == 1.0 and standard_error(better) == 0.0
    assert 0.6 < confidence(query(1.0), query(0.0)) < 0.95
    assert confidence(query(1.0), query(0.9)) < 0.7


def test_more_trajectories_are_surer_whatever_their_order():
    sureness = [confidence(query(*[1.0, 0.5] * n), query(*[0.5, 0.0] * n)) for n in (1, 4, 16, 64)]
    assert sureness == sorted(sureness) and sureness[-1] > 0.99
    errors = [standard_error(query(*[1.0, 0.5] * n)) for n in (1, 4, 16)]
    assert errors == sorted(errors, reverse=True)
    assert confidence(query(1.0, 0.0, 0.3), ANSWER) == pytest.approx(confidence(query(0.3, 1.0, 0.0), ANSWER))


def test_the_two_directions_add_up_and_equal_evidence_is_even():
    first, second = query(1.0, 0.2, 0.0), query(0.4, 0.3)
    assert confidence(first, second) + confidence(second, first) == pytest.approx(1)
    assert confidence(first, first) == 0.5


def test_fresh_rollouts_count_more_than_those_of_the_search_and_can_reverse_an_order():
    better, worse = query(1.0, 1.0), query(0.0, 0.0)
    confirmed = [replace(better, fresh=(1.0, 1.0)), replace(worse, fresh=(0.0, 0.0))]
    longer = [query(1.0, 1.0, 1.0, 1.0), query(0.0, 0.0, 0.0, 0.0)]
    assert confidence(better, worse) < confidence(*longer) < confidence(*confirmed)
    assert confidence(replace(better, fresh=(0.0,) * 4), replace(worse, fresh=(1.0,) * 4)) < 0.5
    assert confirmed[0].searched == better


def test_no_confidence_without_a_trajectory():
    nothing = Decision(("query", "q"), 1, (2,), None, ends=())
    for ask in (lambda: confidence(nothing, ANSWER), lambda: standard_error(nothing)):
        with pytest.raises(ValueError, match="without a complete trajectory"):
            ask()


def test_verdicts_that_differ_make_the_order_of_two_answers_less_sure():
    sure, worse = (replace(ANSWER, reward=reward, ends=(reward,)) for reward in (0.8, 0.2))
    unsure = replace(sure, noise=0.3)
    assert confidence(sure, worse) == 1.0 and standard_error(unsure) == pytest.approx(0.3)
    assert confidence(unsure, worse) == pytest.approx(NormalDist().cdf(0.6 / 0.3))
    search = query(0.2, 0.2, 0.2)
    assert confidence(unsure, search) < confidence(sure, search)
