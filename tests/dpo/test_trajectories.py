from __future__ import annotations

import pytest

from reasonrag.dpo.pairs import derive_trajectory_pairs

STOPS = ["</query>", "</evidence>", "</answer>"]


def tree(*paths, question="1"):
    """Node rows of a tree from paths of texts, each with the F1 of its end (None: it has no answer)."""
    rows = [{"node_id": 0, "parent_id": -1, "depth": 0, "text": "", "f1": None}]
    for *texts, f1 in paths:
        parent = rows[0]
        for depth, text in enumerate(texts, 1):
            same = [r for r in rows if r["parent_id"] == parent["node_id"] and r["text"] == text]
            if not same:
                prompt = [{"role": "user", "content": f"after {parent['text']}"}]
                same = [
                    {"node_id": len(rows), "parent_id": parent["node_id"], "depth": depth, "text": text, "f1": None}
                    | {"prompt": prompt, "prefix": "", "stop": STOPS, "finish_reason": "stop"}
                    | {"action": "query" if text.endswith(tuple(STOPS)) else "malformed"}
                ]
                rows += same
            parent = same[0]
        parent["f1"] = f1
    return [{"dataset": "d", "question_id": question, **row} for row in rows]


def pairs(*trees, **settings):
    rows = [row for tree in trees for row in tree]
    return list(derive_trajectory_pairs(rows, policy="p", config_hash="h", **settings))


def texts(steps):
    return [step["text"] for step in steps]


def test_the_better_answer_is_chosen_and_what_both_share_is_left_out():
    q, e, right, wrong = "<query>q</query>", "<evidence>e</evidence>", "<answer>a</answer>", "<answer>b</answer>"
    (row,) = pairs(tree((q, e, wrong, 0.0), (q, e, "<query>r</query>", e, right, 1.0)))
    assert texts(row["chosen_steps"]) == ["<query>r</query>", e, right]
    assert texts(row["rejected_steps"]) == [wrong]
    assert (row["depth"], row["chosen_reward"], row["rejected_reward"], row["margin"]) == (2, 1.0, 0.0, 1.0)


def test_a_longer_way_to_the_same_answer_is_no_worse_to_an_outcome():
    assert pairs(tree(("<answer>a</answer>", 1.0), ("<query>q</query>", "<answer>a</answer>", 1.0))) == []


def test_each_trajectory_stands_in_one_pair_at_most():
    paths = [(f"<query>{i}</query>", "<answer>a</answer>", i / 8) for i in range(9)]
    rows = pairs(tree(*paths))
    used = [row[side] for row in rows for side in ("chosen_node_id", "rejected_node_id")]
    assert [row["margin"] for row in rows] == [1.0, 0.75, 0.5, 0.25] and len(set(used)) == 8


def test_a_trajectory_without_an_answer_is_in_no_pair():
    assert pairs(tree(("no tag", None), ("<answer>a</answer>", 1.0))) == []


def test_the_same_trajectory_found_twice_counts_once():
    twice = tree(("<answer>b</answer>", 0.0), ("<answer>a</answer>", 1.0))
    again = {**twice[2], "node_id": 3}
    assert len(pairs([*twice, again])) == 1


@pytest.mark.parametrize(("finish", "end"), [("stop", "turn"), ("length", "length")])
def test_only_a_turn_that_the_policy_ended_has_an_end(finish, end):
    rows = tree(("<answer>a</answer>", 1.0), ("no tag", "<answer>b</answer>", 0.0))
    rows[2]["finish_reason"] = finish
    assert pairs(rows)[0]["rejected_steps"][0]["end"] == end


def test_a_trajectory_with_a_step_that_cannot_be_read_is_never_chosen():
    right, wrong = "<answer>a</answer>", "<answer>b</answer>"
    assert pairs(tree(("no tag", right, 1.0), (wrong, 0.0))) == []
    (row,) = pairs(tree(("no tag", right, 1.0), (wrong, 0.0), ("<query>q</query>", right, 1.0)))
    assert texts(row["chosen_steps"]) == ["<query>q</query>", right]


def test_a_step_of_which_nothing_was_written_is_not_scored():
    rows = tree(("<answer>a</answer>", 1.0), ("", "<answer>b</answer>", 0.0))
    rows[2]["finish_reason"] = "length"
    (row,) = pairs(rows)
    assert texts(row["rejected_steps"]) == ["<answer>b</answer>"]
