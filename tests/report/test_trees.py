from __future__ import annotations

from itertools import chain

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.report.trees import QuestionTree, read_trees, tree_of
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import tree_schema
from tests.report.toys import answer, rows_of, write_run


def test_what_is_no_tree_is_refused_by_run_question_and_node(tmp_path):
    rows = rows_of([-1, 0, 0, 1])
    rows[2]["parent_id"] = 9
    run = write_run(tmp_path / "broken", rows_of([-1, 0], "q0"), rows)
    trees = read_trees(run)
    assert next(trees).root["question_id"] == "q0"
    with pytest.raises(DataError) as error:
        next(trees)
    assert f"{run}: question 'q1', node 2: its parent, 9, does not come before it" in str(error.value)
    with pytest.raises(DataError, match="question 'q1'"):
        tree_of(run, "q1")


def test_a_run_is_read_question_by_question_as_it_was_written(run):
    found = list(read_trees(run))
    assert [tree.root["question_id"] for tree in found] == [f"q{n}" for n in range(16)]
    columns = [name for name in tree_schema().names if name not in ("token_ids", "logprobs")]
    assert list(chain.from_iterable(tree.nodes for tree in found)) == list(
        read_shards(run / "trees", "nodes", tree_schema(), columns=columns)
    )


def test_a_tree_may_lie_in_two_shards(tmp_path):
    run = write_run(tmp_path, rows_of([-1, 0, 1], "a"), rows_of([-1, 0, 0, 2], "b"), shard_rows=4)
    assert [len(tree.nodes) for tree in read_trees(run)] == [3, 4]


def test_questions_of_two_data_sets_may_share_an_id(tmp_path):
    run = write_run(tmp_path, rows_of([-1, 0], dataset="one"), rows_of([-1, 0, 0], dataset="two"))
    assert [len(tree.nodes) for tree in read_trees(run)] == [2, 3]
    with pytest.raises(DataError, match="several data sets; `reasonrag report` shows all"):
        tree_of(run, "q1")


def test_an_unknown_question_is_told_the_nearest_ids(run):
    assert tree_of(run, "q12").root["question_id"] == "q12"
    with pytest.raises(DataError, match=r"no tree of question 'q122'; the nearest ids are 'q12', 'q2', 'q1"):
        tree_of(run, "q122")
    with pytest.raises(RunError, match="run build-tree again"):
        tree_of(run / "nothing", "q12")


def test_the_best_path_leads_to_the_oldest_answer_of_the_highest_reward():
    rows = rows_of([-1, 0, 0, 1, 2, 2])
    assert QuestionTree.of(rows).best_path == ()
    for node, spre in ((3, 0.5), (4, 0.9), (5, 0.9)):
        rows[node] |= answer("Spielberg", spre=spre)
    rows[1] |= {"spre": 1.0}  # of no answer
    assert QuestionTree.of(rows).best_path == (0, 2, 4)
