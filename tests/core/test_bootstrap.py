from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import numpy as np
import pytest

from reasonrag.core.bootstrap import (
    Difference,
    Interval,
    OverSeeds,
    Ratio,
    adjusted,
    estimates_by_seed,
    intervals,
)


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


def test_an_interval_does_not_depend_on_memory_or_on_other_columns():
    draws = random.Random(3)
    columns = {name: [draws.random() for _ in range(97)] for name in "abc"}
    columns["b"][5] = None
    together = intervals(columns, seed=4, resamples=700)
    for max_bytes in (1, 10_000, 10**9):
        assert intervals(columns, seed=4, resamples=700, max_bytes=max_bytes) == together
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
    found = intervals({"one": values, "same": same, "apart": apart}, seed=0)
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
