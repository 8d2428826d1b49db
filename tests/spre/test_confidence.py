from __future__ import annotations

import math

import pytest

from reasonrag.spre.decisions import Decision, confidence, standard_error

ANSWER = Decision(("answer", "a"), (1,), 0.5, ends=(0.5,), ceiling=None)


def query(*ends, ceiling=1.0):
    return Decision(("query", "q"), (2,), sum(ends) / len(ends), ends=ends, ceiling=ceiling)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_of_rewards_0_and_1_the_posterior_is_that_of_a_share_with_jeffreys_prior(share):
    """Against an answer of F1 `share`: the tail of Beta(3/2, 1/2), which has a closed form."""
    answer = Decision(("answer", "a"), (1,), share, ends=(share,), ceiling=None)
    below = 2 / math.pi * (math.asin(math.sqrt(share)) - math.sqrt(share * (1 - share)))
    assert confidence(query(1.0), answer) == pytest.approx(1 - below, abs=0.025)
    assert standard_error(query(1.0)) == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_answers_are_certain_and_one_trajectory_is_not():
    better = Decision(("answer", "b"), (3,), 1.0, ends=(1.0, 1.0), ceiling=None)
    assert confidence(better, ANSWER) == 1.0 and standard_error(better) == 0.0
    assert 0.6 < confidence(query(1.0), query(0.0)) < 0.95
    assert confidence(query(1.0, ceiling=1.0), query(0.9)) < 0.7


def test_more_trajectories_are_surer_whatever_their_order():
    found = [confidence(query(*[1.0, 0.5] * n), query(*[0.5, 0.0] * n)) for n in (1, 4, 16, 64)]
    assert found == sorted(found) and found[-1] > 0.99
    errors = [standard_error(query(*[1.0, 0.5] * n)) for n in (1, 4, 16)]
    assert errors == sorted(errors, reverse=True)
    assert confidence(query(1.0, 0.0, 0.3), ANSWER) == confidence(query(0.3, 1.0, 0.0), ANSWER)


def test_the_two_directions_add_up_and_equal_evidence_is_even():
    first, second = query(1.0, 0.2, 0.0), query(0.4, 0.4)
    assert confidence(first, second) + confidence(second, first) == pytest.approx(1, abs=0.03)
    assert confidence(first, first) == pytest.approx(0.5, abs=0.03)


def test_nothing_is_said_without_a_trajectory():
    nothing = Decision(("query", "q"), (2,), None, ends=(), ceiling=1.0)
    for ask in (lambda: confidence(nothing, ANSWER), lambda: standard_error(nothing)):
        with pytest.raises(ValueError, match="without a complete trajectory"):
            ask()
