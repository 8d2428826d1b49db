from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from reasonrag.core.config import SearchConfig
from reasonrag.core.types import StopReason, Trajectory
from reasonrag.formats import ReasonRAGFormat
from reasonrag.mcts.search import Evaluation, Origin, Tree, TreeSearch, select_child
from reasonrag.rollout import Engine
from reasonrag.spre.estimate import RolloutEvaluator, node_rewards
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever


def random_policy(prompt, sampling):
    """A pure function of the request: queries, evidences, answers and nonsense."""
    draw = random.Random(f"{prompt}{sampling.seed}").random()
    if prompt.stop == ("</evidence>",):
        return f"<evidence>e{draw:.2f}</evidence>" if draw < 0.9 else "nonsense"
    if prompt.stop == ("</answer>",) or draw < 0.4:
        return "<answer>Steven Spielberg</answer>" if draw < 0.2 else "<answer>nobody</answer>"
    return f"<query>Jaws {draw:.2f}</query>" if draw < 0.95 else "nonsense"


def build(settings: SearchConfig, *, policy=random_policy, seed: int = 0, k: int = 2, max_steps: int = 8, count=int):
    llm = ScriptedLLM(policy)
    engine = Engine(llm, ToyRetriever(), ReasonRAGFormat(), max_steps=max_steps)
    search = TreeSearch(engine, RolloutEvaluator(engine, k=k, alpha=0.9), settings, seed=seed)
    return asyncio.run(search.run(QUESTION, count=count)), llm


class Valuing:
    """Values every node by a function of its seed, and records the depth and seed of each call."""

    def __init__(self, value=lambda seed: 0.5) -> None:
        self.value = value
        self.calls: list[tuple[int, int]] = []

    async def evaluate(self, trajectory, *, seed):
        self.calls.append((len(trajectory.steps), seed))
        return Evaluation(self.value(seed))

    def tree(self, *, policy=random_policy, max_steps: int = 8, **settings) -> Tree:
        engine = Engine(ScriptedLLM(policy), ToyRetriever(), ReasonRAGFormat(), max_steps=max_steps)
        return asyncio.run(TreeSearch(engine, self, SearchConfig(lag=0, **settings)).run(QUESTION))


def shape(tree: Tree):
    return [(n.parent, n.step and n.step.completion.text, n.visits, n.value, n.origin) for n in tree.nodes]


def test_same_seed_same_tree_other_seed_other_tree():
    settings = SearchConfig(lag=0, iterations=20)
    assert shape(build(settings)[0]) == shape(build(settings)[0])
    assert shape(build(settings)[0]) != shape(build(settings, seed=1)[0])


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_every_rollout_step_is_kept_and_was_asked_once(lag):
    tree, llm = build(SearchConfig(lag=lag, iterations=20))
    assert len(llm.prompts) == len(tree.nodes) - 1
    assert {n.origin for n in tree.nodes} == {Origin.ROOT, Origin.EXPANSION, Origin.ROLLOUT}


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_the_root_is_visited_once_an_iteration(lag):
    ended = Counter[str]()
    tree, _ = build(SearchConfig(lag=lag, iterations=12), count=lambda: ended.update(["iteration"]))
    assert tree.root.visits == ended["iteration"] == 12


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_no_node_has_more_children_than_allowed(lag):
    tree, _ = build(SearchConfig(lag=lag, iterations=40, max_children=3), k=2)
    assert max(len(n.children) for n in tree.nodes) <= 3


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_a_tree_with_nothing_left_to_expand_is_finished(lag):
    tree, llm = build(SearchConfig(lag=lag, iterations=64, max_children=2), policy=lambda p, s: "<answer>x</answer>")
    assert len(tree.nodes) == 3 and tree.root.visits == 2 and len(llm.prompts) == 2


def test_terminal_nodes_are_not_valued_again():
    valuing = Valuing()
    tree = valuing.tree(iterations=64)
    assert len(valuing.calls) == len(tree.nodes) - 1
    # A visit to a node that has ended backs up the value that it has.
    assert tree.root.visits == tree.root.valued == 64 and tree.root.value == 0.5


def test_depth_never_exceeds_the_step_limit_and_its_leaves_were_forced():
    tree, _ = build(
        SearchConfig(lag=0, iterations=60),
        policy=lambda p, s: (
            random_policy(p, s).replace("answer", "query") if p.stop != ("</answer>",) else "<answer>x</answer>"
        ),
        max_steps=4,
    )
    assert max(n.depth for n in tree.nodes) == 4
    assert {n.trajectory.stop_reason for n in tree.nodes if n.depth == 4} <= {StopReason.FORCED_ANSWER}


def test_a_missing_value_counts_the_visit_and_leaves_the_mean():
    tree = Valuing(lambda seed: None).tree(iterations=5)
    assert tree.root.visits == 5 and tree.root.value is None


def test_a_child_without_a_value_is_taken_for_its_parents():
    tree = Tree(QUESTION)
    first, second = (tree.add(tree.root, Trajectory(QUESTION), Origin.EXPANSION) for _ in range(2))
    for node, value in ((tree.root, 0.5), (first, 0.5)):
        node.visits, node.valued, node.value_sum = 1, 1, value
    second.visits = 1
    assert select_child(tree.root, [first, second], selection="puct", c_uct=1.0) is first
    tree.root.value_sum = 0.9
    assert select_child(tree.root, [first, second], selection="puct", c_uct=1.0) is second


@pytest.mark.parametrize("selection", ["puct", "ucb1"])
def test_value_of_the_root_is_the_mean_of_what_was_backed_up(selection):
    # Nothing ends within these iterations, so every visit is an expansion with a value of its own.
    def wandering(prompt, sampling):
        return "<evidence>x</evidence>" if "evidence" in prompt.stop[0] else "<query>Jaws</query>"

    valuing = Valuing(lambda seed: (seed % 100) / 100)
    tree = valuing.tree(policy=wandering, max_steps=30, iterations=25, selection=selection)
    assert len(valuing.calls) == tree.root.valued == tree.root.visits == 25
    assert tree.root.value == pytest.approx(sum(valuing.value(seed) for _, seed in valuing.calls) / 25)


@pytest.mark.parametrize(
    ("c_uct", "chosen"),
    [
        (0.0, 0),  # 0.60 against 0.50: the value alone
        (1.414, 1),  # 0.60 + 1.414 * 2 / 4 = 1.307 against 0.50 + 1.414 * 2 / 2 = 1.914: the rarer one (eq. 5)
        (0.3, 1),  # 0.60 + 0.3 * 2 / 4 = 0.750 against 0.50 + 0.3 * 2 / 2 = 0.800
        (0.1, 0),  # 0.60 + 0.1 * 2 / 4 = 0.650 against 0.50 + 0.1 * 2 / 2 = 0.600
    ],
)
def test_puct_weighs_value_and_visits_as_eq_5(c_uct, chosen):
    tree = Tree(QUESTION)
    children = [tree.add(tree.root, Trajectory(QUESTION), Origin.EXPANSION) for _ in range(2)]
    for node, visits, value in ((children[0], 3, 0.60), (children[1], 1, 0.50)):
        node.visits = node.valued = visits
        node.value_sum = visits * value
    assert select_child(tree.root, children, selection="puct", c_uct=c_uct) is children[chosen]


def test_spre_is_the_mean_over_complete_trajectories_through_a_node():
    tree, _ = build(SearchConfig(lag=0, iterations=30))
    rewards = node_rewards(tree, alpha=0.9)
    leaves = [n for n in tree.nodes if n.trajectory.complete]
    for node in tree.nodes:
        through = [leaf for leaf in leaves if node in list(tree.path_up(leaf))]
        values = [float(leaf.trajectory.answer == "Steven Spielberg") * 0.9**leaf.depth for leaf in through]
        assert rewards[node.id] == (pytest.approx(sum(values) / len(values)) if values else None)


def test_every_visit_of_a_node_that_is_judged_again_has_a_seed_of_its_own():
    valuing = Valuing()
    valuing.tree(policy=lambda p, s: "<answer>x</answer>", iterations=8, max_children=1, rejudge_terminal=True)
    assert len(set(valuing.calls)) == len(valuing.calls) == 8
