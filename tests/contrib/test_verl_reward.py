from __future__ import annotations

import pytest

from contrib.verl_reward import compute_score
from reasonrag.core.text import exact_match
from reasonrag.formats import FORMATS


@pytest.mark.parametrize(
    ("response", "em"),
    [
        ("<think>so</think><answer>the  Jaws!</answer>", 1.0),
        ("<search>q</search><information><answer>no</answer></information><answer>jaws</answer>", 1.0),
        ("<answer>Jaws</answer> or <answer>Alien</answer>", 0.0),
        ("<information><answer>Jaws</answer></information>", 1.0),
        ("<answer> </answer>", 0.0),
        ("<answer></think><answer>Jaws</answer>", 1.0),
        ("Jaws", 0.0),
    ],
)
def test_the_reward_function_for_verl_scores_as_eval_does(response, em):
    assert compute_score("mine", response, {"target": ["Alien 3", "Jaws"]}, extra_info={}) == em
    assert exact_match(FORMATS["search_r1"]().read_text(response).answer, ["Alien 3", "Jaws"]) == em
