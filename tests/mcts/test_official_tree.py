"""The published builder's choices, on a tree computed by hand.

UCB1 with c = 1.414, two children, judge values, terminal nodes judged at every visit, rewards weighted by visits.
Each line: where selection ended, what was written, what the judge said, and the statistics after it.

1  root      n1 = query a            0.6   n1 1/0.6                root 1/0.6
2  root      n2 = answer X           0.5   n2 1/0.5                root 2/1.1
3  n1 (0.6 + 1.177 = 1.777 > 1.677)
             n3 = evidence e         0.2   n3 1/0.2  n1 2/0.8      root 3/1.3
4  n2 (0.5 + 1.482 = 1.982 > 0.4 + 1.048)
             terminal, judged again  0.9   n2 2/1.4                root 4/2.2
5  n2 (0.7 + 1.177 > 0.4 + 1.177)
             judged again            0.1   n2 3/1.5                root 5/2.3
6  n1 (0.4 + 1.268 = 1.668 > 0.5 + 1.036 = 1.536)
             n4 = evidence None      0.3   n4 1/0.3  n1 3/1.1      root 6/2.6
7  n2 (0.5 + 1.093 > 0.367 + 1.093)
             judged again            0.4   n2 4/1.9                root 7/3.0
8  n1 (0.367 + 1.139 = 1.506 > 0.475 + 0.986 = 1.461), then n4 (0.3 + 1.482 > 0.2 + 1.482)
             n5 = answer X Y         0.8   n5 1/0.8  n4 2/1.1  n1 4/1.9  root 8/3.8
"""

from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.types import Question
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.mcts.search import Tree, TreeSearch
from reasonrag.pipeline.tables import tree_rows
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import JudgeEvaluator, node_rewards
from tests.fakes.scripted import ScriptedLLM
from tests.toys import ToyRetriever

STEPS = [
    "<query>film Jaws</query>",
    "<answer>X</answer>",
    "<evidence>e</evidence>",
    "<evidence>None</evidence>",
    "<answer>X Y</answer>",
]
VERDICTS = [0.6, 0.5, 0.2, 0.9, 0.1, 0.3, 0.4, 0.8]
GOLDEN = [  # id, parent, action, N, sum of judge values, reward
    (0, -1, "", 8, 3.8, (4 * 0.486 + 4 * 0.9) / 8),
    (1, 0, "query", 4, 1.9, 0.486),
    (2, 0, "answer", 4, 1.9, 0.9),
    (3, 1, "evidence", 1, 0.2, None),
    (4, 1, "evidence", 2, 1.1, 0.486),
    (5, 4, "answer", 1, 0.8, 2 / 3 * 0.9**3),
]


@pytest.fixture
def config():
    return load_config(preset="official", overrides={"search.iterations": 8})


@pytest.fixture
def tree(config) -> Tree:
    format = ReasonRAGFormat(passage_order=config.retrieval.passage_order)
    judge = JudgeService(ScriptedLLM([f"So the score is {v}" for v in VERDICTS]), PromptSet.find())
    engine = Engine(ScriptedLLM(STEPS), ToyRetriever(), format, max_steps=config.format.max_steps)
    settings = config.search
    return asyncio.run(TreeSearch(engine, JudgeEvaluator(judge), settings).run(Question("1", "Who?", ("X",))))


def test_official_tree_equals_the_hand_computed_one(tree, config):
    value = config.value
    rows = tree_rows(tree, ReasonRAGFormat(), alpha=value.alpha, weighting=value.weighting)
    found = [(r["node_id"], r["parent_id"], r["action"], r["visits"]) for r in rows]
    assert found == [golden[:4] for golden in GOLDEN]
    for row, (*_, visits, total, reward) in zip(rows, GOLDEN, strict=True):
        assert row["value"] == pytest.approx(total / visits)
        assert row["spre"] == (None if reward is None else pytest.approx(reward))


def test_official_prompts_show_the_best_passage_last(tree):
    grounding = tree.nodes[3].step.prompt.messages[1].content
    assert grounding.index("Star Wars") < grounding.index("[2] Jaws")


def test_weighting_by_trajectories_counts_each_answer_once(tree):
    rewards = node_rewards(tree, alpha=0.9)
    assert rewards[0] == pytest.approx((0.486 + 0.9) / 2)


def test_the_whole_budget_is_used_on_a_tree_that_ended_at_once():
    """Two answers at the root: three nodes, and a judge call for every one of the iterations."""
    judge = ScriptedLLM(["So the score is 0.5"] * 64)
    engine = Engine(ScriptedLLM(["<answer>X</answer>"] * 2), ToyRetriever(), ReasonRAGFormat())
    settings = load_config(preset="official").search
    search = TreeSearch(engine, JudgeEvaluator(JudgeService(judge, PromptSet.find())), settings)
    tree = asyncio.run(search.run(Question("1", "Who?", ("X",))))
    assert (len(tree.nodes), tree.root.visits, len(judge.prompts)) == (3, 64, 64)
