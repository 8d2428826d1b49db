from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import numpy as np
import pytest

from reasonrag.core.bootstrap import Difference, Interval, Ratio, adjusted, intervals


def one(values, **settings) -> Interval:
    found = intervals({"x": values}, seed=settings.pop("seed", 0), **settings)["x"]
    assert found is not None
    return found


def bernoulli(n, p):
    return [1.0] * round(n * p) + [0.0] * (n - round(n * p))


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    draws = random.Random(1)
    samples = [[draws.gauss(3.0, 2.0) for _ in range(80)] for _ in range(300)]
    found = [one(sample, seed=number, resamples=1000) for number, sample in enumerate(samples)]
    covered = sum(interval.low <= 3.0 <= interval.high for interval in found)
    assert 0.90 <= covered / len(samples) <= 0.98


def test_it_equals_a_slow_reference():
    values, resamples = [0.0, 1.0, 0.25, 3.0, 2.0, 0.5, 0.0], 500
    rng = np.random.default_rng(11)
    means = sorted(fmean(values[i] for i in rng.integers(0, 7, size=7)) for _ in range(resamples))

    def quantile(share):  # linear between order statistics
        place = share * (resamples - 1)
        below = math.floor(place)
        return means[below] + (place - below) * (means[min(below + 1, resamples - 1)] - means[below])

    found = one(values, seed=11, resamples=resamples)
    assert found.mean == pytest.approx(fmean(values))
    assert (found.low, found.high) == pytest.approx((quantile(0.025), quantile(0.975)))


def test_a_system_differs_from_itself_by_exactly_nothing():
    values = bernoulli(50, 0.3)
    assert intervals({"em": Difference(values, values)}, seed=0)["em"] == Interval(0.0, 0.0, 0.0, 50, p=1.0)


def test_a_pair_without_one_side_is_left_out():
    found = intervals({"em": Difference([1.0, None, 1.0, 0.0], [0.0, 1.0, None, 0.0])}, seed=0)["em"]
    assert (found.n, found.mean) == (2, 0.5)


def test_an_interval_does_not_depend_on_other_columns():
    draws = random.Random(3)
    columns = {name: [draws.random() for _ in range(97)] for name in "abc"}
    columns["b"][5] = None
    together = intervals(columns, seed=4, resamples=700)
    assert {name: one(columns[name], seed=4, resamples=700) for name in columns} == together
    assert together["b"].n == 96


def test_one_value_is_an_interval_and_none_is_not():
    assert one([0.7]) == Interval(0.7, 0.7, 0.7, 1)
    assert intervals({"x": [None, None], "y": []} | {"y": [None, None]}, seed=0) == {"x": None, "y": None}
    assert intervals({"x": []}, seed=0) == {"x": None}
    assert intervals({}, seed=0) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        intervals({"em": [1.0], "f1": [value]}, seed=0)


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        intervals({"a": [1.0], "b": [1.0, 2.0]}, seed=0)


def test_a_ratio_and_a_difference_of_ratios_equal_a_slow_reference():
    part, whole = [1, 0, 2, 0, 1, 0, 0], [1, 3, 2, 0, 4, 1, 0]
    other, others = [0, 1, 0, 0, 2, 0, 1], [2, 1, 1, 0, 2, 0, 3]
    rng = np.random.default_rng(11)
    rates, differences = [], []
    for _ in range(500):
        drawn = rng.integers(0, 7, size=7)
        sums = [sum(column[i] for i in drawn) for column in (part, whole, other, others)]
        if sums[1]:
            rates.append(sums[0] / sums[1])
        if sums[1] and sums[3]:
            differences.append(sums[0] / sums[1] - sums[2] / sums[3])
    ratio = Difference(Ratio(part, whole), Ratio(other, others))
    found = intervals({"osr": Ratio(part, whole), "difference": ratio}, seed=11, resamples=500)
    for name, mean, slow, n in (("osr", 4 / 11, rates, 5), ("difference", 4 / 11 - 4 / 9, differences, 5)):
        low, high = np.quantile(slow, [0.025, 0.975])
        assert (found[name].mean, found[name].n) == (pytest.approx(mean), n)
        assert (found[name].low, found[name].high) == (pytest.approx(low), pytest.approx(high))


def test_a_rate_of_nothing_is_none_and_resamples_of_nothing_are_left_out():
    found = intervals({"none": Ratio([0, 0, None], [0, 0, None]), "few": Ratio([1, 0, 0], [1, 0, 0])}, seed=0)
    assert found == {"none": None, "few": Interval(1.0, 1.0, 1.0, 1)}
    assert intervals({"x": Ratio([None], [None])}, seed=0) == {"x": None}


def test_a_question_that_one_side_of_a_difference_lacks_is_left_out_of_both():
    ratio = Difference(Ratio([1, 1, None, 0], [1, 1, None, 1]), Ratio([None, 0, 1, 0], [None, 1, 1, 2]))
    assert intervals({"x": ratio}, seed=0)["x"].mean == pytest.approx(1 / 2 - 0 / 3)


def test_a_p_value_says_how_likely_the_difference_is_by_chance():
    draws = random.Random(9)
    none, some = ([draws.gauss(mean, 1.0) for _ in range(400)] for mean in (0.0, 0.15))
    found = intervals(
        {"none": Difference(none, [0.0] * 400), "some": Difference(some, [0.0] * 400), "mean": some}, seed=0
    )
    for name in ("none", "some"):
        z = abs(fmean(values := {"none": none, "some": some}[name])) / (np.std(values, ddof=1) / 20)
        assert found[name].p == pytest.approx(2 * (1 - NormalDist().cdf(z)), abs=0.01)
        assert (found[name].p < 0.05) == (found[name].low > 0 or found[name].high < 0)
    assert found["mean"].p is None


def test_adjusted_p_values_are_those_by_hand():
    # m = 5: 0.005 * 5/1, 0.011 * 5/2, 0.02 * 5/3, 0.04 * 5/4, and 0.13 as it is.
    assert adjusted([0.04, 0.005, 0.13, 0.02, 0.011]) == pytest.approx([0.05, 0.025, 0.13, 0.1 / 3, 0.0275])
    assert adjusted([0.03, 0.03, 0.9]) == pytest.approx([0.045, 0.045, 0.9]) and adjusted([]) == []
