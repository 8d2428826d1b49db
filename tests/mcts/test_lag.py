from __future__ import annotations

import asyncio
import random

import pytest

from reasonrag.core.config import SearchConfig
from reasonrag.core.errors import LLMError
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.base import caller
from reasonrag.mcts.search import TreeSearch
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import RolloutEvaluator
from tests.fakes.scripted import ScriptedLLM
from tests.mcts.test_search import Valuing, shape
from tests.toys import QUESTION, ToyRetriever


def searching_policy(prompt, sampling):
    """Like `random_policy`, but only late answers may be right: an early one would take most visits of its tree."""
    draw = random.Random(f"{prompt}{sampling.seed}").random()
    if prompt.stop == ("</evidence>",):
        return f"<evidence>e{draw:.2f}</evidence>"
    if prompt.stop == ("</answer>",):
        return "<answer>Steven Spielberg</answer>" if draw < 0.5 else "<answer>nobody</answer>"
    return f"<query>Jaws {draw:.2f}</query>" if draw < 0.8 else "<answer>nobody</answer>"


class Slow(ScriptedLLM):
    """Answers out of order: each call waits for a few turns of the event loop, drawn by its own generator."""

    def __init__(self, delays: int) -> None:
        super().__init__(searching_policy)
        self.delays = random.Random(delays)
        self.callers: list[tuple[str, int]] = []
        self.in_flight = self.most = 0

    async def complete(self, prompt, sampling):
        self.callers.append((caller.get().question, caller.get().priority))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(self.delays.randrange(40)):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return await super().complete(prompt, sampling)


def searched(llm, settings: SearchConfig, evaluator=None):
    engine = Engine(llm, ToyRetriever(), ReasonRAGFormat())
    evaluator = evaluator or RolloutEvaluator(engine, k=2, alpha=0.9)
    return asyncio.run(TreeSearch(engine, evaluator, settings).run(QUESTION))


@pytest.mark.parametrize("lag", [1, 4, 16])
@pytest.mark.parametrize("selection", ["puct", "ucb1"])
def test_a_tree_depends_on_its_lag_and_not_on_which_call_ends_first(lag, selection):
    settings = SearchConfig(iterations=40, lag=lag, selection=selection)
    trees = [shape(searched(Slow(delays), settings)) for delays in range(3)]
    assert trees[0] == trees[1] == trees[2]
    assert trees[0] != shape(searched(Slow(0), settings.model_copy(update={"lag": 0})))


def test_calls_overlap_and_all_requests_of_a_tree_differ():
    llm = Slow(0)
    searched(llm, SearchConfig(iterations=40, lag=8))
    assert llm.most > 8  # of at most 9 iterations with two rollouts each
    requests = {(str(prompt), sampling.seed) for prompt, sampling in zip(llm.prompts, llm.samplings, strict=True)}
    assert len(requests) == len(llm.prompts)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_iteration_begins_when_so_many_before_it_are_in_flight(lag):
    llm = Slow(0)
    searched(llm, SearchConfig(iterations=8, lag=lag, max_children=8), Valuing())
    completed = [priority for _, priority in llm.callers]
    assert completed == [max(begun - lag, 0) for begun in range(8)]


@pytest.mark.parametrize("lag", [0, 2, 8])
@pytest.mark.parametrize("budget", [1, 20, 60])
def test_a_budget_of_calls_holds_but_for_what_is_in_flight(lag, budget):
    tree = searched(Slow(1), SearchConfig(iterations=64, lag=lag, max_calls=budget))
    assert budget <= len(tree.nodes) - 1 <= budget + (2 * 7 + 1) * (lag + 1) - 1


def test_a_backend_that_gives_up_lets_the_other_iterations_end():
    class Failing(Slow):
        async def complete(self, prompt, sampling):
            reply = await super().complete(prompt, sampling)
            if len(self.prompts) == 10:
                raise LLMError("gone", cause="unreachable")
            return reply

    llm = Failing(0)
    with pytest.raises(LLMError, match="gone"):
        searched(llm, SearchConfig(iterations=64, lag=8))
    assert llm.in_flight == 0


def test_calls_say_for_which_question_they_are_and_how_far_its_tree_is():
    llm = Slow(0)
    searched(llm, SearchConfig(iterations=20, lag=4))
    assert {question for question, _ in llm.callers} == {"toy/q1"}
    progress = [priority for _, priority in llm.callers]
    assert progress[0] == 0 and max(progress) > 10
