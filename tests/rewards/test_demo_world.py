"""All rewards on demonstrations of the demo world, whose judge knows every fact."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest

from reasonrag.demo.judge import DemoJudge, demo_format
from reasonrag.demo.world import Part, demo_questions, make_world
from reasonrag.formats import PromptSet
from reasonrag.retrieval.encoders import LexicalEncoder
from reasonrag.rewards import RewardParts, RewardSettings, open_reward
from reasonrag.rewards.judge import JudgeService, propose_plan
from tests.rewards.toys import knowing, score, values
from tools.demo_policy.demonstrations import FAULTLESS, NO_WHIMS, Improviser
from tools.demo_policy.writing import demonstrate

QUESTIONS = demo_questions("dev")[:60]
FORMAT_OF = {"outcome": "search_r1", "hiprag": "hiprag", "search-p1": "search_p1", "when-to-search": "when_to_search"}


@cache
def pages() -> Part:
    world = make_world(0)
    parts = (world.parts["dev"], world.famous)
    return Part({k: v for p in parts for k, v in p.kinds.items()}, {k: v for p in parts for k, v in p.facts.items()})


def demonstrations(format, habits=FAULTLESS, whims=NO_WHIMS):
    rng = random.Random(0)
    return [demonstrate(Improviser(q, pages(), rng, habits, whims=whims), format) for q in QUESTIONS]


def reward(name, *, error=0.0, policy=None, plans=None):
    judge = JudgeService(DemoJudge(error_rate=error), PromptSet.find("brief"))
    format = demo_format(FORMAT_OF[name])
    policy = policy or knowing({})
    return open_reward(
        RewardSettings(name=name), RewardParts(format, judge, policy, LexicalEncoder(), plans=plans or {})
    )


@pytest.fixture(scope="module")
def plans():
    judge = JudgeService(DemoJudge(), PromptSet.find("brief"))
    return {(q.dataset, q.id): asyncio.run(propose_plan(judge, q)) for q in QUESTIONS}


@pytest.mark.parametrize(("name", "most"), [("outcome", 1.0), ("hiprag", 1.4), ("search-p1", 1.06)])
def test_a_faultless_attempt_earns_the_most(name, most, plans):
    found = score(reward(name, plans=plans), *demonstrations(FORMAT_OF[name]))
    assert set(values(found)) == {most}
