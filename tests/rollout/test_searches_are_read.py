"""No search is made whose passages no step can see: every format, every budget, inference and tree search."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from examples.own_format import AskFormat
from papers.baselines import BASELINES
from reasonrag.core.config import SearchConfig
from reasonrag.core.types import Malformed, Passage, Question, Search, StopReason, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.stream import StreamFormat
from reasonrag.mcts.search import TreeSearch
from reasonrag.rollout import Engine, derive_seed
from reasonrag.spre.estimate import RolloutEvaluator
from tests.fakes.scripted import ScriptedLLM


class StubbornFormat(StreamFormat):
    """A plug-in that reads a search in any completion, also where an answer was asked for."""

    name = "search_r1"

    def parse(self, completion, steps, *, final=False):
        return super().parse(completion, steps, final=final and "<search>" not in completion)


KINDS = {**FORMATS, "ask": AskFormat, "stubborn": StubbornFormat}
ATTEMPTS = 60
CALL = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'
_NO_SEARCH = ("</answer>", "</evidence>", "</conclusion>")


class OnePassage:
    """Finds one passage per query, which no other query finds."""

    fingerprint = "one"

    async def search(self, queries, top_k):
        return [(Passage(query, f"About {query}\nIt is known as {_mark(query)}."),) for query in queries]

    async def aclose(self):
        pass


class Unsure(ScriptedLLM):
    """The first of its tokens, which are characters, was not likely, which is when FLARE searches."""

    async def complete(self, prompt, sampling):
        reply = await super().complete(prompt, sampling)
        logprobs = tuple(-0.1 if number else -9.0 for number in range(len(reply.text)))
        return replace(reply, token_ids=tuple(map(ord, reply.text)), logprobs=logprobs)


def _mark(query):
    return f"mark-{derive_seed(query):08x}"


def _policy(prompt, sampling):
    """Mostly searches and notes, with steps of every kind and nonsense; a pure function of the request."""
    rng = random.Random(f"{prompt}{sampling.seed}")
    word = f"w{rng.random():.6f}"
    tag = next(
        tag for tag in ("<query>", "<ask>", "<tool_call>", "<search>") if tag in str(prompt) or tag == "<search>"
    )
    search = f"so {tag}{word}{tag.replace('<', '</')}" if prompt.stop else CALL % word
    if prompt.stop in (("\n",), ("Intermediate answer:",)):  # of the baselines that write line by line
        search = f"Follow up: {word}"
    elif prompt.stop == ("<|end_search_query|>",):
        search = f"<|begin_search_query|>{word}<|end_search_query|>"
    conclusion = (
        f"{word}</conclusion>" if prompt.prefix.endswith("<conclusion>") else f"<conclusion>{word}</conclusion>"
    )
    others = [
        "",
        "nonsense",
        f"<answer>{word}</answer>",
        f"{word}</answer>",
        f"{tag}{word}",
        f"{tag} {tag.replace('<', '</')}",
    ]
    notes = [f"<evidence>{word}</evidence>", conclusion]
    return rng.choice([*[search] * 40, *others, *notes * 6])


def _unread(steps):
    """The searches whose passages are in no later prompt, and all searches."""
    searches = [(at, step.action.query) for at, step in enumerate(steps) if isinstance(step.action, Search)]
    unread = []
    for at, query in searches:
        later = [str([m.content for m in step.prompt.messages]) + step.prompt.prefix for step in steps[at + 1 :]]
        if not any(_mark(query) in text for text in later):
            unread.append(query)
    return unread, searches


@pytest.mark.parametrize("kind", KINDS)
def test_every_search_of_an_attempt_is_read(kind):
    question, made = Question("q", "Who directed Jaws?", ("Spielberg",)), 0
    for budget in range(1, 9):
        engine = Engine(ScriptedLLM(_policy), OnePassage(), KINDS[kind](), max_steps=budget)
        ended = asyncio.run(engine.run([Trajectory(question)] * ATTEMPTS, seeds=range(ATTEMPTS)))
        for trajectory in ended:
            unread, searches = _unread(trajectory.steps)
            made += len(searches)
            assert not unread, f"budget {budget}: {[step.action for step in trajectory.steps]}"
            assert all(step.prompt.stop != ("</answer>",) for step in trajectory.steps[:-1])
    assert made > ATTEMPTS


@pytest.mark.parametrize("kind", KINDS | BASELINES)
def test_at_a_limit_of_searches_at_most_so_many_are_made_and_all_are_read(kind):
    question, made = Question("q", "Who directed Jaws?", ("Spielberg",)), Counter()
    format = (KINDS | BASELINES)[kind]()
    for limit in range(4):
        engine = Engine(Unsure(_policy), OnePassage(), format, max_steps=9, max_searches=limit)
        for ended in asyncio.run(engine.run([Trajectory(question)] * ATTEMPTS, seeds=range(ATTEMPTS))):
            unread, searches = _unread(ended.steps)
            assert not unread and len(searches) <= limit, [step.action for step in ended.steps]
            made[limit] = max(made[limit], len(searches))
    most = {"direct": 0, "cot": 0, "rag": 1, "iter_retgen": 3}.get(kind, 3)
    assert made == {limit: min(limit, most) for limit in range(4)}, kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_search_of_a_tree_is_read(kind):
    question, made = Question("q", "Who directed Jaws?", ("Spielberg",)), 0
    for budget in range(1, 9):
        engine = Engine(ScriptedLLM(_policy), OnePassage(), KINDS[kind](), max_steps=budget)
        search = TreeSearch(
            engine, RolloutEvaluator(engine, k=1, alpha=0.9), SearchConfig(lag=0, iterations=40), seed=budget
        )
        tree = asyncio.run(search.run(question))
        leaves = [node for node in tree.nodes if not node.children and node.step]
        assert all(node.terminal for node in leaves)
        for node in leaves:
            unread, searches = _unread(node.trajectory.steps)
            made += len(searches)
            assert not unread, f"budget {budget}: {[step.action for step in node.trajectory.steps]}"
    assert made > 100


@pytest.mark.parametrize("kind", FORMATS)
def test_how_many_searches_a_step_limit_allows(kind):
    """What the help of `eval --max-turns` says of Figure 6 (arXiv:2505.14069)."""

    def searching(prompt, sampling):
        if not prompt.stop:  # a message: a call where there is something to call
            return CALL % "x" if "tools" in [message.role for message in prompt.messages] else "x"
        if (closing := prompt.stop[0]) in ("]", "<|end_of_query|>"):
            act = "Action: finish[" if prompt.stop == ("]",) else "Action: search["
            return f"{act}x]" if closing == "]" else f"<|begin_of_query|>x{closing}"
        opening = prompt.stop[0].replace("/", "")
        if prompt.prefix.endswith("<conclusion>"):
            return "x</conclusion>"
        return f"x{prompt.stop[0]}" if opening in prompt.prefix[-9:] else f"{opening}x{prompt.stop[0]}"

    def searches(limit):
        engine = Engine(ScriptedLLM(searching), OnePassage(), FORMATS[kind](), max_steps=limit)
        (ended,) = asyncio.run(engine.run([Trajectory(Question("q", "Who?", ("x",)))], seeds=[0]))
        assert ended.stop_reason is StopReason.FORCED_ANSWER
        return sum(isinstance(step.action, Search) for step in ended.steps)

    allowed = [searches(limit) for limit in range(1, 12)]
    assert allowed == [(limit - 1) // 2 if kind == "reasonrag" else limit - 1 for limit in range(1, 12)]


def test_a_search_where_the_answer_was_asked_for_is_not_made():
    class Counting(OnePassage):
        asked = 0

        async def search(self, queries, top_k):
            Counting.asked += len(queries)
            return await super().search(queries, top_k)

    llm = ScriptedLLM(["<search>who</search>"])
    engine = Engine(llm, Counting(), StubbornFormat(), max_steps=1)
    (ended,) = asyncio.run(engine.run([Trajectory(Question("q", "Who?", ("x",)))], seeds=[0]))
    assert Counting.asked == 0 and ended.stop_reason is StopReason.NO_ANSWER
    assert isinstance(ended.steps[0].action, Malformed)
