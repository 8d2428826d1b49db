"""What a process reward model learns from a tree, and how it is measured."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from reasonrag.prm.train import label_steps, measures
from tests.spre.test_decisions import AGAIN, ANSWER, QUERY, tree


def test_a_decision_is_labelled_once_with_its_spre_and_what_has_no_answer_is_left_out():
    nodes = tree(
        (0, "ask", QUERY, None), (1, "read", "<answer>a</answer>", 1.0),
        (0, "ask", AGAIN, None), (3, "read", "<answer>b</answer>", 0.0),
        (0, "ask", ANSWER, 0.4), (0, "ask", "<query>never answered</query>", None),
    )  # fmt: skip
    labelled = list(label_steps([row | {"token_ids": None} for row in nodes], alpha=0.5))
    found = {row.sides.chosen[0].text: row.target for row in labelled}
    assert {text: target.value for text, target in found.items()} == pytest.approx(
        {QUERY: 0.125, ANSWER: 0.2, "<answer>a</answer>": 0.25, "<answer>b</answer>": 0.0}
    )
    assert found[QUERY].weight == pytest.approx(2 / 3) and found[ANSWER].weight == 1.0, "an answer is certain"
    assert found[QUERY].state == found[ANSWER].state != found["<answer>a</answer>"].state
    assert labelled[0].sides.chosen[0].prompt.messages[0].content == "ask"


def test_order_and_calibration_are_what_they_are_by_definition():
    random = np.random.default_rng(0)
    spre = random.random(60).round(1)
    said = (spre + random.normal(0, 0.3, 60)).clip(0, 0.99).round(1)
    states = [n // 6 for n in range(60)], [n // 3 % 2 for n in range(60)]
    found = measures(*states, said.tolist(), spre.tolist(), usual=0.5)

    order = [
        0.5 * (int(said[a] > said[b]) + int(said[a] >= said[b]))
        for a, b in product(range(60), range(60))
        if a // 3 == b // 3 and spre[a] - spre[b] > 0.001
    ]
    assert found["sibling_auc"]["mean"] == pytest.approx(np.mean(order)) and found["siblings"] == len(order)
    assert found["brier"]["mean"] == pytest.approx(((said - spre) ** 2).mean())
    assert found["usual_brier"]["mean"] == pytest.approx(((0.5 - spre) ** 2).mean())
    bins = (said * 10).astype(int)
    gaps = [abs((said - spre)[bins == one].sum()) for one in set(bins)]
    assert found["ece"]["mean"] == pytest.approx(sum(gaps) / 60)
    assert all(found[name]["low"] < found[name]["mean"] < found[name]["high"] for name in ("brier", "ece"))


def test_an_order_that_nothing_can_be_said_of_is_unknown():
    found = measures([0, 1], [0, 0], [0.2, 0.3], [0.0, 0.1], usual=0.5)
    assert found["sibling_auc"] is None and found["brier"]["n"] == 2
