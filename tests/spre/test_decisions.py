from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest

from reasonrag.core.errors import DataError
from reasonrag.dpo.pairs import PairRules, derive_pairs
from reasonrag.spre.decisions import content_of, decisions_of, full_prompt
from reasonrag.spre.estimate import check_tree


def tree(*nodes, question="1"):
    """Rows of a tree from (parent, prompt, text, F1); a text is `<type>content</type>`, or cannot be parsed."""
    rows = [{"node_id": 0, "parent_id": -1, "depth": 0, "action": "", "content": "", "text": "", "f1": None}]
    for parent, prompt, text, f1 in nodes:
        tag, content = text.strip("<").split(">", 1) if text.startswith("<") else ("malformed", "no_tag")
        row = {"node_id": len(rows), "parent_id": parent, "depth": rows[parent]["depth"] + 1, "action": tag}
        row |= {"content": content.split("<")[0], "text": text, "f1": f1}
        rows.append(row | {"prompt": [{"role": "user", "content": prompt}]})
    rest = {"prompt": [], "prefix": "", "stop": ["</query>", "</evidence>", "</answer>"], "finish_reason": "stop"}
    rest |= {"origin": "expansion", "passages": []}
    rest |= {"dataset": "d", "question_id": question, "visits": 1, "valued": 0, "value": None, "prompt_tokens": None}
    return [rest | row for row in rows]


def preferences(rows, **settings):
    left_out = settings.pop("left_out", None)
    rules = PairRules(**{"alpha": 0.5, "min_margin": 0.0, "rule": "siblings"} | settings)
    return list(derive_pairs(rows, rules, policy="p", config_hash="h", left_out=left_out))


QUERY, AGAIN, ANSWER = "<query>The Jaws</query>", "<query>jaws!</query>", "<answer>Jaws</answer>"


def test_equal_steps_in_equal_states_share_their_trajectories():
    rows = tree(
        (0, "ask", QUERY, None), (1, "read", "<answer>a</answer>", 1.0),
        (0, "ask", AGAIN, None), (3, "read", "<answer>b</answer>", 0.0), (3, "read", "<answer>c</answer>", 0.5),
        (0, "ask", ANSWER, 0.4),
    )  # fmt: skip
    decided = decisions_of(rows, alpha=0.5)
    query, answer = decided[1], decided[6]
    assert decided[3] is query
    assert query.nodes == (1, 3) and sorted(query.ends) == [0.0, 0.125, 0.25]
    assert query.reward == pytest.approx(0.125) and answer.reward == pytest.approx(0.2)
    kept = [pair for pair in preferences(rows) if pair["depth"] == 0]
    # Valued apart, the answer would be worse than the first query and better than the second one.
    assert [(pair["chosen_node_id"], pair["rejected_node_id"]) for pair in kept] == [(6, 1)]
    assert (kept[0]["chosen_pooled"], kept[0]["rejected_pooled"]) == ([6], [1, 3])
    assert kept[0]["rejected"][0]["content"] == QUERY and kept[0]["margin"] == pytest.approx(0.075)


def test_children_of_equal_steps_stand_in_one_state_and_their_values_are_shared():
    rows = tree(
        (0, "ask", QUERY, None), (1, "read", "<answer>a</answer>", 1.0), (1, "read", "<evidence>e</evidence>", None),
        (3, "end", "<answer>d</answer>", 0.0),
        (0, "ask", AGAIN, None), (5, "read", "<evidence>e</evidence>", None), (6, "end", "<answer>f</answer>", 1.0),
        (6, "end", "<answer>a</answer>", 1.0), (5, "read", "<answer>a</answer>", 1.0),
    )  # fmt: skip
    pairs = preferences(rows)
    (of_reading,) = [pair for pair in pairs if pair["prompt"][0]["content"] == "read"]
    assert (of_reading["chosen_pooled"], of_reading["rejected_pooled"]) == ([2, 9], [3, 6])
    assert (of_reading["chosen_node_id"], of_reading["rejected_node_id"]) == (2, 3)
    assert of_reading["rejected_reward"] == pytest.approx((0 + 2 * 0.125) / 3)
    # `d` and `f` are no siblings, so they are not compared, though they follow the same prompt.
    assert {(pair["chosen_node_id"], pair["rejected_node_id"]) for pair in pairs} == {(2, 3)}


def test_a_trajectory_through_two_nodes_of_a_decision_counts_once():
    rows = tree((0, "ask", "hm", None), (1, "ask", "hm", None), (2, "ask", ANSWER, 1.0), (1, "ask", ANSWER, 0.0))
    hm = decisions_of(rows, alpha=1.0)[1]
    assert hm.nodes == (1, 2) and sorted(hm.ends) == [0.0, 1.0] and hm.reward == 0.5


def test_weights_of_a_judge_and_of_visits():
    rows = tree(
        (0, "ask", QUERY, None), (1, "read", ANSWER, 1.0), (1, "read", "<answer>b</answer>", 0.0),
        (0, "ask", AGAIN, None), (4, "read", ANSWER, 0.5),
    )  # fmt: skip
    rows[1] |= {"visits": 3, "valued": 2, "value": 0.9}
    rows[2] |= {"visits": 4}
    rows[4] |= {"visits": 1, "valued": 1, "value": 0.3}
    assert decisions_of(rows, alpha=1.0, reward="judge")[1].reward == pytest.approx((2 * 0.9 + 0.3) / 3)
    assert decisions_of(rows, alpha=1.0, weighting="visits")[1].reward == pytest.approx((3 * 0.8 + 1 * 0.5) / 4)


def test_what_another_question_reverses_is_left_out_and_counted():
    left_out = defaultdict(int)
    said = [(0, "ask", QUERY, 0.0), (0, "ask", ANSWER, 1.0)]
    reversed_ = [(0, "ask", AGAIN, 1.0), (0, "ask", ANSWER, 0.0)]
    rows = tree(*said) + tree(*reversed_, question="2") + tree(*said, question="3")
    assert [pair["question_id"] for pair in preferences(rows, left_out=left_out)] == ["1"]
    assert left_out == {"reversed": 1}


def random_tree(rng, nodes):
    """A tree of few distinct texts, in which a step that cannot be parsed leaves the state as it is."""
    parents, prompts, made, open_nodes = [-1], ["ask"], [], [0]
    for node in range(1, nodes):
        parent = rng.choice(open_nodes)
        text = rng.choice([QUERY, AGAIN, "<query>b</query>", "hm", ANSWER, "<answer>Paris</answer>"])
        ended = text.startswith("<answer>")
        made.append((parent, prompts[parent], text, rng.choice([0.0, 0.5, 1.0]) if ended else None))
        parents.append(parent)
        prompts.append(prompts[parent] if text == "hm" else f"{prompts[parent]} {text}")
        if not ended:
            open_nodes.append(node)
    return tree(*made)


def naive_reward(rows, prompt, content, alpha):
    """The mean over the answers that have a node of the decision among themselves and their ancestors."""
    rewards = []
    for row in rows:
        node, found = row, False
        while node["parent_id"] >= 0:
            found |= full_prompt(node) == prompt and content_of(node) == content
            node = rows[node["parent_id"]]
        if found and row["f1"] is not None:
            rewards.append(row["f1"] * alpha ** row["depth"])
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("alpha", [1.0, 0.7])
def test_no_pair_ever_contradicts_another_and_rewards_are_those_of_the_answers(alpha):
    rng = random.Random(f"trees {alpha}")
    total = 0
    for _ in range(40):
        rows = random_tree(rng, rng.randint(3, 40))
        pairs = preferences(rows, alpha=alpha, min_margin=0.01)
        best = preferences(rows, alpha=alpha, rule="best")
        compared = {frozenset((pair["chosen_node_id"], pair["rejected_node_id"])) for pair in best}
        assert len(compared) == len(best)  # never both ways
        said = set()
        for pair in pairs:
            sides = [rows[pair[f"{side}_node_id"]] for side in ("chosen", "rejected")]
            prompt, contents = json.dumps(pair["prompt"]), list(map(content_of, sides))
            assert {(prompt, *contents), (prompt, *contents[::-1])}.isdisjoint(said)
            said.add((prompt, *contents))
            for side, row, content in zip(("chosen", "rejected"), sides, contents, strict=True):
                assert pair[f"{side}_reward"] == pytest.approx(naive_reward(rows, pair["prompt"], content, alpha))
                same = [r["node_id"] for r in rows[1:] if (r["prompt"], content_of(r)) == (row["prompt"], content)]
                assert pair[f"{side}_pooled"] == same and row["parent_id"] == pair["parent_node_id"]
                assert row["node_id"] == min(n for n in same if rows[n]["parent_id"] == row["parent_id"])
        total += len(pairs)
    assert total > 100


@pytest.mark.parametrize("parent", [1, 2, 99])
def test_a_node_below_itself_or_below_none_is_no_tree_and_ends(parent):
    rows = tree((0, "ask", QUERY, None), (1, "read", ANSWER, 1.0))
    rows[1]["parent_id"] = parent
    with pytest.raises(DataError, match="node 1: no tree of build-tree has it there"):
        preferences(rows)
    rows = [row | dict.fromkeys(("spre", "em", "stage", "stop_reason", "valued", "visits"), 0) for row in rows]
    with pytest.raises(DataError, match=f"node 1: its parent, {parent}, does not come before it"):
        check_tree(rows, fully=True, alpha=0.9)
