from __future__ import annotations

from collections import Counter

import pytest

from reasonrag.dpo.pairs import PairRules, derive_pairs, derive_trajectory_pairs, in_test_split, open_turn
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema


def node(node_id, parent=0, spre=0.5, text=None, action="query", content=None, **more):
    content = f"c{node_id}" if content is None else content
    return {
        "dataset": "d",
        "question_id": "1",
        "question": "Who?",
        "node_id": node_id,
        "parent_id": parent,
        "depth": 1,
        "action": action,
        "content": content,
        "text": f"<{action}>{content}</{action}>" if text is None else text,
        "prompt": [{"role": "user", "content": f"state {parent}"}],
        "prefix": "",
        "f1": spre,  # at alpha 1 it is the reward of an end, whatever its depth
        "value": spre,
        "origin": "expansion",
        "passages": [],
        "visits": 1,
        "valued": 1,
        "stop": ["</query>", "</evidence>", "</answer>"],
        "finish_reason": "stop",
        "prompt_tokens": None,
    } | more


def with_roots(nodes):
    """Put a root before the first node of each question."""
    for node in nodes:
        if node["node_id"] == 1:
            yield node | {"node_id": 0, "parent_id": -1, "depth": 0, "action": "", "f1": None, "value": None}
        yield node


def pairs(*nodes, **settings):
    given = {"policy": "p", "config_hash": "h"}
    for name in ("policy", "config_hash", "repeated", "left_out"):
        given |= {name: settings.pop(name)} if name in settings else {}
    rules = PairRules(**{"alpha": 1.0, "rule": "siblings"} | settings)
    return list(derive_pairs(with_roots(nodes), rules, **given))


def ids(rows):
    return [(r["chosen_node_id"], r["rejected_node_id"]) for r in rows]


def test_the_higher_reward_is_chosen():
    (row,) = pairs(node(1, spre=0.2), node(2, spre=0.9))
    assert ids([row]) == [(2, 1)]
    assert (row["chosen_reward"], row["rejected_reward"], row["margin"]) == (0.9, 0.2, pytest.approx(0.7))
    assert row["chosen"] == [{"role": "assistant", "content": "<query>c2</query>"}]
    assert row["depth"] == 0


def test_every_two_siblings_make_a_pair_and_cousins_make_none():
    rows = pairs(node(1, spre=0.1), node(2, spre=0.5), node(3, spre=0.9), node(4, parent=3, spre=0.9))
    assert sorted(ids(rows)) == [(2, 1), (3, 1), (3, 2)]


@pytest.mark.parametrize(("margin", "count"), [(0.009, 0), (0.01, 1), (0.011, 1)])
def test_the_smallest_margin_counts(margin, count):
    assert len(pairs(node(1, spre=0.8), node(2, spre=0.8 + margin))) == count


def test_a_branch_without_an_answer_makes_no_pair():
    assert pairs(node(1, spre=None), node(2, spre=0.9)) == []


def test_contents_that_normalise_to_nothing_are_compared_as_steps():
    assert len(pairs(node(1, content="!"), node(2, spre=0.9, content="?"))) == 1


def test_a_step_that_cannot_be_read_is_rejected_but_never_chosen():
    broken = {"action": "malformed", "content": "no_tag", "text": "hm"}
    assert ids(pairs(node(1, **broken, spre=0.1), node(2, spre=0.9))) == [(2, 1)]
    assert pairs(node(1, **broken, spre=0.9), node(2, spre=0.1)) == []


def test_exact_duplicates_are_kept_once_in_the_whole_data_set():
    twin = {"question_id": "2"}
    nodes = [
        node(1, spre=0.1, content="a"), node(2, spre=0.9, content="b"),
        node(1, spre=0.1, content="a", **twin), node(2, spre=0.9, content="b", **twin),
    ]  # fmt: skip
    assert len(pairs(*nodes)) == len(pairs(*nodes, repeated={("d", "1"), ("d", "2")})) == 1


def test_a_judge_score_is_the_reward_only_where_asked_for():
    nodes = (node(1, spre=0.1, value=0.9), node(2, spre=0.9, value=0.1))
    assert ids(pairs(*nodes)) == [(2, 1)]
    assert ids(pairs(*nodes, reward="judge")) == [(1, 2)]


def test_pairs_of_two_runs_never_share_an_id():
    nodes = (node(1, spre=0.1), node(2, spre=0.9))
    first, second = (pairs(*nodes, config_hash=run) for run in ("run 1", "run 2"))
    assert first[0]["pair_id"] != second[0]["pair_id"]


def test_the_split_is_by_question_and_by_share():
    held_out = [in_test_split(("d", str(i)), 0.2) for i in range(5000)]
    assert 0.17 < sum(held_out) / 5000 < 0.23
    assert held_out == [in_test_split(("d", str(i)), 0.2) for i in range(5000)]
    assert not any(in_test_split(("d", str(i)), 0.0) for i in range(100))


def test_a_step_of_which_nothing_was_written_is_in_no_pair():
    cut = node(1, spre=0.0, action="malformed", content="no_tag", text="", finish_reason="length")
    assert pairs(cut, node(2, spre=0.9)) == []
    ended = node(1, spre=0.0, action="malformed", content="no_tag", text="", finish_reason="stop")
    assert [row["rejected_end"] for row in pairs(ended, node(2, spre=0.9))] == ["turn"]


def test_a_turn_that_was_open_already_is_the_end_of_the_prompt_and_tells_pairs_apart():
    """Without it, a step of a growing turn would be trained as if it were the first one."""
    first, second = ({"prefix": f"<think>so far {number}</think>"} for number in (1, 2))
    same = [{"role": "user", "content": "state 0"}]
    rows = pairs(
        *(node(1, spre=0.9, text="a", content="a", **first), node(2, spre=0.1, text="b", content="b", **first)),
        *(node(3, parent=1, spre=0.9, text="a", content="a", prompt=same, **second),
          node(4, parent=1, spre=0.1, text="b", content="b", prompt=same, **second)),
        *(node(5, parent=2, spre=0.9, text="a", content="a", prompt=same),
          node(6, parent=2, spre=0.1, text="b", content="b", prompt=same)),
    )  # fmt: skip
    assert [row["prompt"][1:] for row in rows] == [
        [{"role": "assistant", "content": "<think>so far 1</think>"}],
        [{"role": "assistant", "content": "<think>so far 2</think>"}],
        [],
    ]


def test_a_pair_has_every_column_of_its_table_and_says_where_each_side_comes_from():
    better = node(2, spre=0.9, visits=5, finish_reason="length", prompt_tokens=11)
    worse = node(1, spre=0.2, action="answer", visits=2, text="It is c1.")
    (row,) = pairs(worse, better)
    assert set(row) == set(pair_schema().names)
    assert (row["dataset"], row["question_id"], row["policy"], row["config_hash"]) == ("d", "1", "p", "h")
    assert (row["chosen_type"], row["rejected_type"]) == ("query", "answer")
    assert (row["chosen_visits"], row["rejected_visits"], row["prompt_tokens"]) == (5, 2, 11)
    assert (row["chosen_end"], row["rejected_end"]) == ("stop", "turn")
    assert row["rejected"] == [{"role": "assistant", "content": "It is c1."}]
    (whole,) = derive_trajectory_pairs(
        [node(0, parent=-1, spre=None, f1=None), worse | {"f1": 0.0}, better | {"f1": 1.0, "action": "answer"}],
        policy="p",
        config_hash="h",
    )
    assert set(whole) == set(trajectory_pair_schema().names)
    assert (whole["policy"], whole["config_hash"]) == ("p", "h")


def test_malformed_steps_are_told_apart_by_their_texts():
    rows = pairs(
        node(1, spre=0.1, action="malformed", content="same", text="hm"),
        node(2, spre=0.2, action="malformed", content="same", text="ha"),
        node(3, spre=0.9),
    )
    assert sorted(ids(rows)) == [(3, 1), (3, 2)]
    assert len(pairs(node(1, spre=0.1, action="malformed", content="c2", text="hm"), node(2, spre=0.9))) == 1


def test_trajectories_of_a_question_with_no_margin_end_that_question_alone():
    nodes = []
    for question, better in (("1", 0.5), ("2", 1.0)):
        root = node(0, parent=-1, spre=None, f1=None, question_id=question)
        worse = node(1, spre=0.5, f1=0.5, action="answer", question_id=question)
        nodes += [root, worse, node(2, spre=better, f1=better, action="answer", question_id=question)]
    (pair,) = derive_trajectory_pairs(nodes, policy="p", config_hash="h")
    assert pair["question_id"] == "2"


def test_a_pair_says_how_sure_it_is_and_unsure_ones_can_be_left_out():
    """A query with one answer below it, one with two, and an answer."""
    nodes = (
        node(1, spre=None), node(2, spre=None), node(3, spre=0.5, action="answer"),
        node(4, parent=1, spre=1.0, action="answer"),
        node(5, parent=2, spre=0.1, action="answer"), node(6, parent=2, spre=0.0, action="answer", content="x"),
    )  # fmt: skip
    rows = {pair: row for row in pairs(*nodes) if (pair := ids([row])[0]) != (5, 6)}
    assert {pair: (row["chosen_rollouts"], row["rejected_rollouts"]) for pair, row in rows.items()} == {
        (1, 2): (1, 2), (1, 3): (1, 1), (3, 2): (1, 2)
    }  # fmt: skip
    assert rows[3, 2]["chosen_error"] == 0 < rows[3, 2]["rejected_error"] < rows[1, 3]["chosen_error"]
    assert 0.5 < min(rows[1, 3]["confidence"], rows[3, 2]["confidence"]) < rows[1, 2]["confidence"] < 1

    left_out = Counter()
    sure = pairs(*nodes, min_confidence=rows[1, 2]["confidence"], left_out=left_out)
    assert (5, 6) in ids(sure) and (1, 3) not in ids(sure) and left_out["low confidence"] >= 1


def test_the_verdicts_behind_a_judges_value_are_not_known():
    (row,) = pairs(node(1, value=0.9), node(2, value=0.1), reward="judge")
    assert (row["chosen_error"], row["rejected_error"], row["confidence"]) == (None, None, None)


def test_a_step_without_a_text_is_not_part_of_the_turn_that_the_next_prompt_opens():
    """The policy ended its turn at once, and is asked the same again, or for an answer: its end token is not read."""
    opened = {"prefix": "So the answer is <answer>"}
    silent = [node(1, text="", token_ids=[7]), node(2, text="", token_ids=[7], **opened)]
    assert open_turn([*silent, node(3, text="x</answer>", token_ids=[8, 9], **opened)]) is None


def answer(node_id, f1, content, parent=0, **more):
    return node(node_id, parent, spre=f1, action="answer", content=content, **more)


def fresh(node_id, f1, parent):
    return answer(node_id, f1, "fresh", parent, origin="confirmation", prompt=[])


def test_a_query_that_found_other_passages_the_second_time_is_no_rival_of_itself():
    found = [
        node(place, spre=None, content="Jaws", passages=[{"id": id_}]) for place, id_ in ((1, "recorded"), (2, "p0"))
    ]
    ends = (answer(3, 1.0, "x", parent=1, prompt=[]), answer(4, 0.0, "x", parent=2, prompt=[]))
    assert pairs(*found, *ends, rule="best") == []


def test_the_best_is_compared_with_the_worst_of_each_type_and_searching_with_answering():
    nodes = (
        *(node(1, spre=None), node(2, spre=None), node(3, spre=None)),
        *(answer(4, 1.0, "x", parent=1), answer(5, 0.5, "x", parent=2), answer(6, 0.0, "x", parent=3)),
        *(answer(7, 1.0, "right"), answer(8, 0.0, "wrong"), answer(9, 0.0, "bad")),
        node(10, spre=None, action="malformed", content="no_tag", text="hm"),
        answer(11, 0.2, "x", parent=10),
    )
    # Answers are right in one case of three, the best query in all: it is not time to answer.
    assert sorted(ids(pairs(*nodes, rule="best"))) == [(1, 3), (1, 9), (1, 10), (7, 9)]
    (crossed,) = [row for row in pairs(*nodes, rule="best") if ids([row]) == [(1, 9)]]
    assert (crossed["rejected_pooled"], crossed["rejected_reward"]) == ([7, 8, 9], pytest.approx(1 / 3))
    # One of each type in turn, the surest first.
    assert ids(pairs(*nodes, rule="best", per_question=2))[0] == (7, 9)
    assert len(pairs(*nodes, rule="best", per_question=2)) == 2


def test_steps_that_do_the_same_are_one_decision():
    found = [{"passages": [{"id": name} for name in names]} for names in ("ab", "ba", "c")]
    queries = [node(number, spre=None, **more) for number, more in enumerate(found, 1)]
    ends = [answer(number + 3, f1, "x", parent=number) for number, f1 in ((1, 1.0), (2, 0.0), (3, 0.2))]
    (row,) = pairs(*queries, *ends, rule="best")
    assert (row["chosen_pooled"], row["rejected_pooled"], row["chosen_reward"]) == ([1, 2], [3], 0.5)
    notes = [node(1, action="evidence", content="x b"), node(2, action="evidence", content="B, x!", spre=0.1)]
    assert pairs(*notes, rule="best") == [] and len(pairs(*notes)) == 1


def test_fresh_rollouts_confirm_a_pair_and_never_choose_it():
    search = (
        *(node(1, spre=None), node(2, spre=None), answer(3, 1.0, "x", parent=1), answer(4, 0.0, "x", parent=2)),
        answer(5, 0.4, "x"),
    )
    good = [fresh(number, 1.0, parent=1) for number in (6, 7, 8)] + [
        fresh(number, 0.0, parent=2) for number in (9, 10, 11)
    ]
    plain, confirmed = pairs(*search, rule="best"), pairs(*search, *good, rule="best")
    assert ids(plain) == ids(confirmed)
    assert confirmed[0]["chosen_rollouts"] == 4 and plain[0]["confidence"] < confirmed[0]["confidence"]
    reverse = [fresh(number, float(parent == 2), parent) for number, parent in enumerate([1, 1, 1, 2, 2, 2], 6)]
    dropped = Counter()
    assert (1, 2) not in ids(pairs(*search, *reverse, rule="best", min_confidence=0.5, left_out=dropped))
    assert dropped["low confidence"] >= 1
    demanded = [fresh(number, 1.0, parent=0) for number in (6, 7, 8)]  # answers after the prompt of the root
    (crossed,) = [row for row in pairs(*search, *demanded, rule="best") if row["rejected_type"] == "answer"]
    assert crossed["rejected_reward"] == pytest.approx(3.4 / 4) and crossed["confidence"] < plain[1]["confidence"]


def test_the_dose_of_pairs_that_a_shorter_path_alone_decides():
    trees = []
    for number in range(40):
        where = {"question_id": str(number), "prompt": [{"role": "user", "content": f"state {number}"}]}
        trees += [
            *(node(1, spre=None, **where), node(2, spre=None, **where)),
            answer(3, 1.0, "x", parent=1, depth=2, question_id=str(number), prompt=[]),
            answer(4, 1.0, "x", parent=2, depth=4, question_id=str(number), prompt=[]),
        ]
    counts = [len(pairs(*trees, alpha=0.9, rule="best", path_share=share)) for share in (0.0, 0.25, 1.0)]
    assert counts[0] == 0 and 4 <= counts[1] <= 16 and counts[2] == 40


def test_as_many_say_yes_rather_than_no_as_the_other_way_round():
    trees = []
    for number, right in enumerate(["yes", "Paris", "no", "yes", "Paris", "yes"]):
        where = {"question_id": str(number), "prompt": [{"role": "user", "content": f"state {number}"}]}
        texts = ("Paris", "Rome") if right == "Paris" else ("yes", "no")
        trees += [answer(place, float(text == right), text, **where) for place, text in enumerate(texts, 1)]
    left_out = Counter()
    rows = pairs(*trees, rule="best", left_out=left_out)
    # In the order of the trees, also where a pair had to wait for its opposite.
    assert [(row["question_id"], row["chosen"][0]["content"][8:-9]) for row in rows] == [
        *(("0", "yes"), ("1", "Paris"), ("2", "no"), ("4", "Paris"))
    ]
    assert left_out["one-sided yes or no"] == 2
