from __future__ import annotations

import pytest

from reasonrag.reproduce.measures import described, difference, sign, verdict


def row(em=1.0, *, over=None, searches=None, lasj=None, retrievals=1, kind="one_hop"):
    return {
        **{"kind": kind, "hops": 1, "em": em, "retrievals": retrievals, "lasj": lasj},
        **{"steps_over": over, "searches_known": searches},
    }


def test_a_rate_is_over_all_steps_of_all_questions_and_seeds():
    seeds = {0: {"a": row(over=1, searches=1), "b": row(over=0, searches=3)}, 1: {"a": row(over=2, searches=4)}}
    found = described(seeds, ["osr"])
    assert found["all"]["osr"]["mean"] == pytest.approx(3 / 8)
    assert found["by_seed"]["osr"] == [1 / 4, 1 / 2]


def test_a_question_without_a_search_says_nothing_of_needless_ones():
    found = described({0: {"a": row(over=1, searches=2), "b": row(over=0, searches=0)}}, ["osr"])
    assert (found["all"]["osr"]["mean"], found["all"]["osr"]["n"]) == (0.5, 1)


def test_what_no_judge_has_told_is_unknown_and_not_zero():
    found = described({0: {"a": row(), "b": row()}}, ["em", "osr", "lasj"])
    assert found["all"]["em"]["mean"] == 1.0
    assert found["all"]["osr"] is None and found["all"]["lasj"] is None
    assert found["by_seed"]["osr"] == [None]


def test_a_verdict_that_is_missing_leaves_its_question_out():
    found = described({0: {"a": row(lasj=True), "b": row(lasj=None), "c": row(lasj=False)}}, ["lasj"])
    assert (found["all"]["lasj"]["mean"], found["all"]["lasj"]["n"]) == (0.5, 2)


def test_kinds_of_questions_are_told_apart():
    found = described({0: {"a": row(1.0), "b": row(0.0, kind="known"), "c": row(0.0, kind="")}}, ["em"])
    assert {kind: metrics["em"]["mean"] for kind, metrics in found["by_kind"].items()} == {"known": 0, "one_hop": 1}
    assert found["all"]["em"]["n"] == 3


def test_differences_are_over_the_seeds_and_questions_that_both_have():
    first = {0: {"a": row(1.0), "b": row(1.0)}, 1: {"a": row(1.0)}}
    second = {0: {"a": row(0.0), "c": row(1.0)}, 2: {"a": row(1.0)}}
    found = difference(first, second, ["em"])
    assert found["seeds"] == [0] and found["questions"] == 1
    assert found["all"]["em"] == {"mean": 1, "low": 1, "high": 1, "n": 1}
    assert found["by_seed"]["em"] == [1.0]
    assert difference({0: first[0]}, {1: second[0]}, ["em"]) is None


def test_a_difference_of_rates_is_the_difference_of_the_micro_averages():
    first = {0: {"a": row(over=1, searches=1), "b": row(over=0, searches=3)}}
    second = {0: {"a": row(over=0, searches=2), "b": row(over=1, searches=8)}}
    found = difference(first, second, ["osr"])["all"]["osr"]
    assert found["mean"] == pytest.approx(1 / 4 - 1 / 10)
    assert found["low"] <= found["mean"] <= found["high"]


@pytest.mark.parametrize(
    ("low", "high", "paper", "expected"),
    [
        (0.1, 0.3, 5.9, "agree"),
        (-0.3, -0.1, -5.9, "agree"),
        (0.1, 0.3, -5.9, "disagree"),
        (-0.3, -0.1, 5.9, "disagree"),
        (-0.1, 0.3, 5.9, "undecided"),
        (0.0, 0.3, 5.9, "undecided"),
        (0.0, 0.0, 5.9, "undecided"),
        (0.1, 0.3, 0.0, "no sign"),
    ],
)
def test_a_sign_counts_only_where_the_interval_excludes_zero(low, high, paper, expected):
    assert verdict({"mean": (low + high) / 2, "low": low, "high": high, "n": 9}, paper) == expected


def test_nothing_measured_has_no_sign():
    assert sign(None) is None and verdict(None, 5.9) == "unknown"
