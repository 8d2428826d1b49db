from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.config import SearchConfig
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.mcts import TreeSearch
from reasonrag.pipeline.build import tree_rows
from reasonrag.pipeline.pair_tables import revalued
from reasonrag.rollout import Engine
from reasonrag.spre import RolloutEvaluator
from tests.mcts.test_search import random_policy
from tests.toys import QUESTION, ToyRetriever


@pytest.mark.parametrize("weighting", ["trajectories", "visits"])
def test_rewards_at_another_alpha_are_those_of_the_tree_valued_with_it(weighting):
    format = ReasonRAGFormat()
    engine = Engine(ScriptedLLM(random_policy), ToyRetriever(), format)
    search = TreeSearch(engine, RolloutEvaluator(engine, k=2, alpha=0.9), SearchConfig(iterations=12), seed=3)
    tree = asyncio.run(search.run(QUESTION))
    rows = tree_rows(tree, format, alpha=0.9, weighting=weighting)
    assert len({row["spre"] for row in rows}) > 3
    for alpha in (1.0, 0.5):
        assert revalued(rows, alpha=alpha, weighting=weighting) == tree_rows(
            tree, format, alpha=alpha, weighting=weighting
        )
