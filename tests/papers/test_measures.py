from __future__ import annotations

import pytest

from papers.measures import described, difference, mean_hops, read_seeds, sign, verdict
from reasonrag.core.errors import RunError
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import step as step_schema
from reasonrag.storage.tables import trajectory_schema


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


def test_what_no_judge_has_told_is_unknown_and_not_zero():
    found = described({0: {"a": row(), "b": row()}}, ["em", "osr", "lasj"])
    assert found["all"]["em"]["mean"] == 1.0
    assert found["all"]["osr"] is None and found["all"]["lasj"] is None
    assert found["by_seed"]["osr"] == [None]


def test_a_verdict_that_is_missing_leaves_its_question_out():
    found = described({0: {"a": row(lasj=True), "b": row(lasj=None), "c": row(lasj=False)}}, ["lasj"])
    assert (found["all"]["lasj"]["mean"], found["all"]["lasj"]["n"]) == (0.5, 2)


def test_differences_are_over_the_seeds_and_questions_that_both_have():
    first = {0: {"a": row(1.0), "b": row(1.0)}, 1: {"a": row(1.0)}}
    second = {0: {"a": row(0.0), "c": row(1.0)}, 2: {"a": row(1.0)}}
    found = difference(first, second, ["em"])
    assert found["seeds"] == [0] and (found["questions"], found["questions_by_seed"]) == (1, [1])
    assert found["all"]["em"] == {"mean": 1, "low": 1, "high": 1, "n": 1, "p": pytest.approx(2 / 10_001)}
    assert found["by_seed"]["em"] == [1.0]
    assert difference({0: first[0]}, {1: second[0]}, ["em"]) is None


def test_a_difference_of_rates_is_the_difference_of_the_micro_averages():
    first = {0: {"a": row(over=1, searches=1), "b": row(over=0, searches=3)}}
    second = {0: {"a": row(over=0, searches=2), "b": row(over=1, searches=8)}}
    found = difference(first, second, ["osr"])["all"]["osr"]
    assert found["mean"] == pytest.approx(1 / 4 - 1 / 10)
    assert found["low"] <= found["mean"] <= found["high"]


@pytest.mark.parametrize(
    ("mean", "p", "n", "paper", "expected"),
    [
        (0.2, 0.05, 10, 5.9, "agree"),
        (-0.2, 0.01, 10, -5.9, "agree"),
        (0.2, 0.01, 10, -5.9, "disagree"),
        (-0.2, 0.01, 10, 5.9, "disagree"),
        (0.2, 0.051, 10, 5.9, "undecided"),
        (0.2, 0.01, 9, 5.9, "undecided"),
        (0.0, 1.0, 10, 5.9, "undecided"),
        (0.2, 0.01, 10, 0.0, "no sign"),
    ],
)
def test_a_sign_counts_only_if_it_survives_the_adjustment_over_ten_questions(mean, p, n, paper, expected):
    # The interval alone does not decide: it is that of one comparison.
    assert verdict({"mean": mean, "low": 0.1, "high": 0.3, "p_adjusted": p, "n": n}, paper) == expected


def test_nothing_measured_has_no_sign():
    assert sign(None) is None and verdict(None, 5.9) == "unknown"


def attempt(question, *, em=1.0, retrievals=1, hops=1, kind="one_hop"):
    return {
        **dict.fromkeys(("f1", "acc", "format_rate"), em),
        **{"dataset": "d", "question_id": question, "question": "?", "golden_answers": ["x"], "kind": kind},
        **{"hops": hops, "answer": "x", "stop_reason": "answered", "em": em, "retrievals": retrievals},
        **{"steps": 2 * retrievals + 1, "forced": 0, "prompt_tokens": 1, "completion_tokens": 1, "trajectory": []},
    }


def written(folder, *rows):
    """The rows of an evaluation, as they are read back."""
    (folder / "p" / "trajectories").mkdir(parents=True)
    write_parquet(folder / "p" / "trajectories" / "t0-00000-of-00001.parquet", rows, trajectory_schema())
    return read_seeds({0: folder}, "p", "t0")[0]


def test_needless_and_early_searches_are_told_from_those_needed(tmp_path):
    rows = written(
        tmp_path,
        attempt("more", retrievals=3, hops=1),
        attempt("less", retrievals=1, hops=3),
        attempt("by heart", retrievals=0, hops=1, kind="known"),
        attempt("no hops", hops=None),
    )
    assert {q: (r.get("needless"), r.get("early")) for q, r in rows.items()} == {
        **{"more": (2, 0), "less": (0, 1), "by heart": (0, 0), "no hops": (None, None)}
    }
    assert mean_hops({0: rows}) == {"known": 1.0, "one_hop": 2.0}


def step(action, content, *passages):
    found = [{"id": "p", "contents": contents, "score": 1.0} for contents in passages]
    return {**dict.fromkeys(step_schema().names), "action": action, "content": content, "prompt": [], "passages": found}


def test_what_was_found_noted_and_could_be_read_comes_from_the_steps(tmp_path):
    searched = [step("query", "who", "Title\nIt was x, they say."), step("evidence", "nobody"), step("answer", "x")]
    noted = [step("malformed", "no_tag"), step("query", "who", "Title\nxx"), step("evidence", "The x.")]
    rows = written(
        tmp_path,
        attempt("searched") | {"steps": 3, "trajectory": searched},
        attempt("noted") | {"steps": 3, "trajectory": noted},
        attempt("yes or no") | {"golden_answers": ["Yes"], "steps": 3, "trajectory": searched},
    )
    assert {q: (r["steps_parsed"], r.get("found"), r.get("noted")) for q, r in rows.items()} == {
        **{"searched": (3, 1, 0), "noted": (2, 0, 1), "yes or no": (3, None, None)}
    }
    found = described({0: rows}, ["parsed", "found", "noted"])["all"]
    assert (found["parsed"]["mean"], found["found"]["n"], found["noted"]["mean"]) == (pytest.approx(8 / 9), 2, 0.5)


def test_an_evaluation_that_is_missing_is_named(tmp_path):
    with pytest.raises(RunError, match="no trajectories at t0"):
        read_seeds({0: tmp_path}, "p", "t0")


def test_differences_are_paired_by_question_and_seeds_are_kept_apart(tmp_path):
    base = [written(tmp_path / f"base{s}", *(attempt(str(q), em=float(q == 0)) for q in range(4))) for s in range(2)]
    mine = [written(tmp_path / f"mine{s}", *(attempt(str(q), em=float(q <= s)) for q in range(4))) for s in range(2)]
    assert described(dict(enumerate(mine)), ["em"])["by_seed"]["em"] == [0.25, 0.5]
    found = difference(dict(enumerate(mine)), dict(enumerate(base)), ["em", "steps"])
    assert found["questions"] == 4
    assert found["all"]["em"]["mean"] == pytest.approx(0.125)
    assert found["by_seed"]["em"] == [0.0, 0.25]
    assert found["by_kind"]["one_hop"]["em"] == found["all"]["em"]
    assert found["all"]["steps"] == {"mean": 0, "low": 0, "high": 0, "n": 4, "p": 1.0}
