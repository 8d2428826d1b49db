"""Intervals over questions and seeds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from papers.seeds import OverSeeds, estimates_by_seed, intervals
from reasonrag.core.bootstrap import Difference, Interval, Ratio


def by_hand(estimate, seeds, n, resamples=400):
    """The interval and p of `estimate(drawn questions)`, given the estimates of each seed, one resample at a time."""
    rng = np.random.default_rng(5)
    over_questions = [estimate(rng.integers(0, n, size=n)) for _ in range(resamples)]
    error, spread, center = np.var(seeds, ddof=1) / len(seeds), np.var(over_questions), estimate(np.arange(n))
    freedom = (error + spread) ** 2 / (error**2 / (len(seeds) - 1))
    rng = np.random.default_rng([5, 1])
    normal = [rng.standard_normal() for _ in range(resamples)]
    drawn = []
    for value, noise in zip(over_questions, normal, strict=True):
        student = 1 / math.sqrt(rng.chisquare(freedom) / freedom)
        drawn.append(center + (value - center + noise * math.sqrt(error)) * student)
    below, above = sum(value <= 0 for value in drawn), sum(value >= 0 for value in drawn)
    return center, *np.quantile(drawn, [0.025, 0.975]), 2 * (min(below, above) + 1) / (resamples + 1)


def test_an_interval_over_seeds_equals_a_slow_reference():
    first = np.array([[2.0, 0.0, 5.0, 1.0, 3.0], [4.0, 1.0, 4.0, 2.0, 3.0], [9.0, 1.0, 6.0, 0.0, 4.0]])
    second = np.array([[1.0, 1.0, 4.0, 1.0, 1.0], [2.0, 2.0, 4.0, 3.0, 0.0], [1.0, 0.0, 0.0, 1.0, 5.0]])
    wholes = np.array([[2.0, 1.0, 5.0, 4.0, 3.0], [4.0, 1.0, 8.0, 2.0, 3.0], [9.0, 2.0, 6.0, 0.0, 4.0]])
    measures = {
        "mean": OverSeeds([Difference(list(a), list(b)) for a, b in zip(first, second, strict=True)]),
        "rate": OverSeeds(
            [
                Difference(Ratio(list(a), list(w)), Ratio(list(b), list(w)))
                for a, b, w in zip(first, second, wholes, strict=True)
            ]
        ),
    }
    found = intervals(measures, seed=5, resamples=400)
    slow = {
        "mean": by_hand(lambda drawn: (first - second)[:, drawn].mean(), (first - second).mean(axis=1), 5),
        "rate": by_hand(
            lambda drawn: (first - second)[:, drawn].sum() / wholes[:, drawn].sum(),
            (first - second).sum(axis=1) / wholes.sum(axis=1),
            5,
        ),
    }
    for name, (mean, low, high, p) in slow.items():
        # The range of single questions cuts the slow reference's tails off, and none of its quantiles here.
        assert found[name] == Interval(*(pytest.approx(value) for value in (mean, low, high)), 5, pytest.approx(p))


def test_seeds_that_agree_change_nothing_and_seeds_that_do_not_widen_the_interval():
    draws = random.Random(8)
    values = [float(draws.random() < 0.5) for _ in range(100)]
    raised = [min(1.0, value + (index < 40)) for index, value in enumerate(values)]
    same, apart = OverSeeds([values] * 3), OverSeeds([values, values, raised])
    found = intervals({"one": OverSeeds([values]), "same": same, "apart": apart}, seed=0)
    assert found["one"] == found["same"]
    assert found["apart"].high - found["apart"].low > 1.05 * (found["one"].high - found["one"].low)


def test_a_share_stays_a_share_however_much_the_seeds_differ():
    found = intervals({"x": OverSeeds([[0.0] * 20, [1.0] + [0.0] * 19, [1.0] * 9 + [0.0] * 11])}, seed=0)["x"]
    assert found.low == 0.0 and found.high <= 1.0


def test_a_question_counts_with_the_seeds_that_know_it():
    one, two = [1.0, None, 0.0, None], [0.0, 1.0, None, None]
    found = intervals({"x": OverSeeds([one, two])}, seed=0)["x"]
    assert (found.mean, found.n) == (0.5, 3)
    often = [[1.0, 0.0, 1.0], [1.0, None, None], [1.0, None, 0.0]]
    assert intervals({"x": OverSeeds(often)}, seed=0)["x"].mean == pytest.approx(4 / 6)
    assert estimates_by_seed(OverSeeds([one, two, [None] * 4])) == [0.5, 0.5, None]
    paired = OverSeeds([Difference(one, [1.0, 1.0, 1.0, 1.0]), Difference(two, [None, 0.0, 0.0, 0.0])])
    assert intervals({"x": paired}, seed=0)["x"].mean == pytest.approx((0.0 + 1.0 - 1.0) / 3)
