"""A whole task for verl, without verl: `make peers` lets verl's own classes read and score it."""

from __future__ import annotations

import asyncio
import random
import runpy

import pytest

from contrib.verl import TextFormat, export_task, question_of, trajectory_of
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.settings import validate
from reasonrag.core.types import Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.stream import StreamFormat
from reasonrag.online_rl.settings import load_rl_settings
from reasonrag.publish.exporters import verl_schema
from reasonrag.retrieval.encoders import LexicalEncoder
from reasonrag.rewards import RewardParts, RewardSettings, open_reward
from reasonrag.rewards.base import trajectory_text
from reasonrag.rollout import Engine
from reasonrag.storage.parquet import read_parquet
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever

TEXTUAL = [name for name, make in FORMATS.items() if isinstance(make(), StreamFormat)]
SEARCHES = {
    "search_r1": "<think>t</think><search>Jaws</search>",
    "hiprag": "<step><reasoning>t</reasoning><search>Jaws</search>",
    "search_p1": "<reasoning>t</reasoning><tool_call>Jaws</tool_call>",
    "when_to_search": "<think>t</think><search>Jaws film</search>",
}
OTHERS = [
    *("c</conclusion>", "<conclusion>c</conclusion>", "<reflect>r</reflect>", "<answer>Steven Spielberg</answer>"),
    *("</think>\n<answer>Spielberg</answer>", "<reasoning>r</reasoning><answer>Steven Spielberg</answer>", "nonsense"),
    *("<information>mine</information> <answer>x</answer>", "<search> </search>", "t</reasoning><answer>and</answer>"),
    *("Thought: c\nAction: finish[Steven Spielberg]", "<think>c</think> so <answer>Steven Spielberg</answer>", ""),
]
REWARDS = [
    {"outcome": {"format_weight": 0.2, "answer_present": 0.1}},
    {"name": "hiprag", "hiprag": {"lambda_p": 0}},
    {"name": "search-p1", "search_p1": {"self_track": False, "reference_track": False, "outcome": "binary"}},
    {"name": "when-to-search", "when_to_search": {"stages": "unified"}},
]


def attempts(name):
    """What the engine makes of a policy that mostly searches, and writes what it likes."""

    def says(prompt, sampling):
        rng = random.Random(f"{prompt}{sampling.seed}")
        return rng.choice([*[SEARCHES[name]] * 8, *OTHERS])

    engine = Engine(ScriptedLLM(says), ToyRetriever(), FORMATS[name](), max_steps=4)
    return asyncio.run(engine.run([Trajectory(QUESTION)] * 80, seeds=range(80)))


@pytest.mark.parametrize("name", TEXTUAL)
def test_a_text_is_worth_what_the_trajectory_behind_it_is_worth(name):
    form = FORMATS[name]()
    made = attempts(name)
    # verl decodes the words after those that open the turn.
    responses = [trajectory_text(trajectory).removeprefix(form.opening) for trajectory in made]
    texts = [trajectory_of(form, QUESTION, response) for response in responses]
    assert [text.answer for text in texts] == [trajectory.answer for trajectory in made]
    values = set()
    for given in REWARDS:
        settings = validate(RewardSettings, given)
        known = asyncio.run(open_reward(settings, RewardParts(form, encoder=LexicalEncoder())).score(made, step=0))
        found = asyncio.run(
            open_reward(settings, RewardParts(TextFormat(form), encoder=LexicalEncoder())).score(texts, step=0)
        )
        assert found == known
        values |= {score.value for score in known}
    assert len(values) > 5, "or nothing was compared"


def settings(**more):
    overrides = {"limit": 6, "validation.limit": 3, "format.name": "search_r1", **more}
    return load_rl_settings(preset="demo-outcome", overrides=overrides)


def test_a_task_is_questions_a_reward_and_rollouts(tmp_path):
    assert export_task(settings(), tmp_path / "out") == {"train": 6, "test": 3}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"train.parquet", "test.parquet", "reward.py", "agent.yaml", "task.yaml", "overrides.txt"} <= files
    (first, *_) = read_parquet(tmp_path / "out/train.parquet", verl_schema())
    score = runpy.run_path(str(tmp_path / "out/reward.py"))["compute_score"]
    question = question_of(first)
    asked = first["data_source"], f"<think>t</think><answer>{question.golden_answers[0]}</answer>"
    found = asyncio.run(score(*asked, first["reward_model"]["ground_truth"], first["extra_info"], extra=1))
    assert found == {"score": 1.0, "em": 1.0, "f1": 1.0, "cem": 1.0, "rc": 0.0, "well_formed": 1.0}


def silent(trajectories):
    """A reward that has none."""
    return [None for _ in trajectories]


def test_a_reward_that_fails_is_no_score(tmp_path):
    export_task(settings(**{"reward.name": f"python:{__name__}:silent"}), tmp_path / "out")
    score = runpy.run_path(str(tmp_path / "out/reward.py"))["compute_score"]
    (first, *_) = read_parquet(tmp_path / "out/train.parquet", verl_schema())
    with pytest.raises(RunError, match="has no reward"):
        asyncio.run(score("", "<answer>x</answer>", first["reward_model"]["ground_truth"], first["extra_info"]))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"format.name": "reasonrag"}, "is not one growing turn"),
        ({"reward.name": "spre"}, "of single steps"),
        ({"reward.outcome.search_confidence": 0.4}, "which only `rl train` knows"),
        ({"reward.name": "when-to-search"}, "the stage has to be fixed"),
        ({"reward.name": "hiprag", "judge.spec": "demo-judge"}, "hiprag.over_search to false"),
        ({"reward.name": "search-p1", "judge.spec": "demo-judge"}, "needs reference plans"),
    ],
)
def test_what_a_text_does_not_show_is_refused_before_anything_is_written(wrong, told, tmp_path):
    with pytest.raises(ConfigError, match=told) as caught:
        export_task(settings(**wrong), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
