from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.config import SearchConfig
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.mcts.search import Tree, TreeSearch
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import JudgeEvaluator, RolloutEvaluator
from tests.fakes.scripted import ScriptedLLM
from tests.mcts.test_search import random_policy, shape
from tests.toys import QUESTION, ToyRetriever

MAX_STEPS = 7
K = 2


def by_rollouts(settings: SearchConfig, *, policy=random_policy) -> tuple[Tree, int]:
    """The tree and the policy calls that it took."""
    llm = ScriptedLLM(policy)
    engine = Engine(llm, ToyRetriever(), ReasonRAGFormat(), max_steps=MAX_STEPS)
    search = TreeSearch(engine, RolloutEvaluator(engine, k=K, alpha=0.9), settings)
    return asyncio.run(search.run(QUESTION)), len(llm.prompts)


def by_judge(settings: SearchConfig, *, policy=random_policy, verdict="So the score is 0.5") -> tuple[Tree, int, int]:
    """The tree, the policy calls and the judge calls that it took."""
    llm, judge = ScriptedLLM(policy), ScriptedLLM(verdict if callable(verdict) else lambda p, s: verdict)
    engine = Engine(llm, ToyRetriever(), ReasonRAGFormat(), max_steps=MAX_STEPS)
    evaluator = JudgeEvaluator(JudgeService(judge, PromptSet.find()))
    tree = asyncio.run(TreeSearch(engine, evaluator, settings).run(QUESTION))
    return tree, len(llm.prompts), len(judge.prompts)


def test_a_tree_stops_at_the_first_iteration_by_which_its_rollouts_have_used_the_budget():
    grown = [by_rollouts(SearchConfig(lag=0, iterations=n)) for n in range(1, 25)]
    assert all(calls == len(tree.nodes) - 1 for tree, calls in grown)
    for budget in range(1, grown[-1][1]):
        tree, calls = by_rollouts(SearchConfig(lag=0, iterations=24, max_calls=budget))
        expected, enough = next((tree, calls) for tree, calls in grown if calls >= budget)
        assert shape(tree) == shape(expected)
        assert budget <= calls == enough <= budget + K * (MAX_STEPS - 1)


@pytest.mark.parametrize("budget", range(1, 21))
def test_a_judged_tree_counts_steps_and_verdicts_and_exceeds_its_budget_by_one_at_most(budget):
    tree, steps, verdicts = by_judge(SearchConfig(lag=0, iterations=64, max_calls=budget))
    assert steps == verdicts == len(tree.nodes) - 1
    assert steps + verdicts == budget + budget % 2


def test_a_verdict_that_had_to_be_asked_for_again_counts_once():
    _, steps, asked = by_judge(
        SearchConfig(lag=0, max_calls=10),
        verdict=lambda p, s: "So the score is 0.5" if "this line only" in p.messages[1].content else "?",
    )
    assert (steps, asked) == (5, 10)


def test_verdicts_on_nodes_that_have_ended_count():
    settings = SearchConfig(lag=0, max_children=2, rejudge_terminal=True, max_calls=20)
    tree, steps, verdicts = by_judge(settings, policy=lambda p, s: "<answer>x</answer>")
    assert (steps, verdicts, tree.root.visits) == (2, 18, 18)


def test_whichever_budget_is_used_up_first_ends_the_tree():
    assert by_judge(SearchConfig(lag=0, iterations=3, max_calls=100))[0].root.visits == 3
    assert by_judge(SearchConfig(lag=0, iterations=100, max_calls=6))[0].root.visits == 3
