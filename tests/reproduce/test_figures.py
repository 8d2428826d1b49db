from __future__ import annotations

import pytest

from reasonrag.core.errors import RunError
from reasonrag.reproduce.figures import compare, over_seeds, read_attempts
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import trajectory_schema


def attempt(question, *, em=1.0, retrievals=1, hops=1, kind="one_hop"):
    return {
        **dict.fromkeys(("f1", "acc", "format_rate"), em),
        **{"dataset": "d", "question_id": question, "question": "?", "golden_answers": ["x"], "kind": kind},
        **{"hops": hops, "answer": "x", "stop_reason": "answered", "em": em, "retrievals": retrievals},
        **{"steps": 2 * retrievals + 1, "forced": 0, "prompt_tokens": 1, "completion_tokens": 1, "trajectory": []},
    }


def written(folder, *rows):
    (folder / "p" / "trajectories").mkdir(parents=True)
    write_parquet(folder / "p" / "trajectories" / "t0-00000-of-00001.parquet", rows, trajectory_schema())
    return read_attempts(folder, "p", "t0")


def test_needless_and_early_searches_are_told_from_those_needed(tmp_path):
    rows = written(
        tmp_path,
        attempt("more", retrievals=3, hops=1),
        attempt("less", retrievals=1, hops=3),
        attempt("by heart", retrievals=0, hops=1, kind="known"),
    )
    assert {q: (r["needless"], r["early"]) for q, r in rows.items()} == {
        **{"more": (2, 0), "less": (0, 1), "by heart": (0, 0)},
    }


def test_an_evaluation_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RunError, match="no trajectories at t0"):
        read_attempts(tmp_path, "p", "t0")


def test_a_question_counts_once_with_its_mean_over_the_seeds(tmp_path):
    first = written(tmp_path / "0", attempt("a", em=1.0), attempt("b", em=0.0))
    second = written(tmp_path / "1", attempt("a", em=0.0), attempt("b", em=0.0))
    merged = over_seeds([first, second])
    assert {question: row["em"] for question, row in merged.items()} == {"a": 0.5, "b": 0.0}


def test_differences_are_paired_by_question_and_seeds_are_kept_apart(tmp_path):
    base = [written(tmp_path / f"base{s}", *(attempt(str(q), em=float(q == 0)) for q in range(4))) for s in range(2)]
    mine = [written(tmp_path / f"mine{s}", *(attempt(str(q), em=float(q <= s)) for q in range(4))) for s in range(2)]
    found = compare({"base": base, "mine": mine}, [("mine", "base")])
    assert found["questions"] == 4 and found["hops"] == {"one_hop": 1}
    assert found["variants"]["mine"]["by_seed"] == [0.25, 0.5]
    difference = found["differences"]["mine - base"]
    assert difference["all"]["em"]["mean"] == pytest.approx(0.125)
    assert difference["by_seed"] == [0.0, 0.25]
    assert difference["by_kind"]["one_hop"]["em"] == difference["all"]["em"]
    assert difference["all"]["steps"] == {"mean": 0, "low": 0, "high": 0, "n": 4}
