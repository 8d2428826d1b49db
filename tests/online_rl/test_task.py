"""What a training is made of: what names it, what is missing, and where its searches go."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from papers import PAPERS
from reasonrag.core.config import JudgeConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.demo.world import demo_questions
from reasonrag.online_rl import task as tasks
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import plan_schema
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.scripted import ScriptedLLM
from tests.online_rl.toys import settings

TOYS = "tests.online_rl.toys"
OWN = {"reward__name": f"python:{__name__}:brevity"}
ROW = {
    "dataset": "demo",
    "question_id": demo_questions("train")[0].id,
    "planner": "p",
    "steps": ["s"],
    "candidates": 1,
    "correct": 1,
    "votes": 0,
}


@pytest.fixture
def plans(tmp_path):
    write_parquet(tmp_path / "plans.parquet", [ROW], plan_schema())
    return str(tmp_path / "plans.parquet")


def content(preset="demo-hiprag", **overrides):
    return tasks.open_task(settings(preset, **overrides)).content_of


def test_another_judge_or_other_prompts_of_it_are_another_training(tmp_path):
    names = {content(judge__spec=spec)["judge"] for spec in ("demo-judge", "demo-judge:0", "demo-judge:0:0.5")}
    assert names == {"demo-judge", "demo-judge:0", "demo-judge:0:0.5"}
    shipped = tasks.PromptSet.find("brief").folder
    for changed in ("judge/same_meaning.txt", "hiprag/direct.txt"):
        own = tmp_path / changed.partition("/")[0]
        for text in shipped.rglob("*.txt"):
            copy = own / text.relative_to(shipped)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text.read_text())
        assert content(format__prompts=str(own)) == content()
        (own / changed).write_text("Something else.")
        assert content(format__prompts=str(own))["judge_prompts"] != content()["judge_prompts"]


def test_other_weights_of_the_model_that_says_what_is_known_are_another_training(tmp_path):
    named = {"reward__hiprag__known_by": f"hf:{tmp_path}"}
    (tmp_path / "config.json").write_text("{}")
    before = content(**named)["known_by"]
    (tmp_path / "config.json").write_text('{"trained": "again"}')
    assert content(**named)["known_by"] != before and "known_by" not in content()


def test_a_judge_that_a_reward_does_not_ask_is_no_part_of_the_training(plans):
    assert content(reward__name="outcome") == content(reward__name="outcome", judge__spec="demo-judge:0:0.5")
    assert "judge" not in content(reward__hiprag__lambda_p=0.0, judge__spec=None)
    assert "judge" not in content("demo-when-to-search")
    assert "judge" in content("demo-when-to-search", outcome__name="judge")
    assert content("demo-search-p1", plans=plans).keys() >= {"judge", "plans"}
    assert content(reward__name=f"{TOYS}:OwnReward")["judge"] == "demo-judge", "it may ask it"


@pytest.mark.parametrize("known_by", [None, "demo:hiprag"])
def test_another_model_can_say_what_the_policy_knew(known_by, tmp_path):
    named = settings("demo-hiprag", reward__hiprag__known_by=known_by)
    own = ScriptedLLM(lambda prompt, sampling: "I forgot.")

    async def policy_asked():
        async with AsyncExitStack() as opened:
            reward = tasks.open_task_reward(named, tasks.open_task(named), own, tmp_path / "journal.sqlite", opened)
            return reward.parts.policy

    assert (asyncio.run(policy_asked()) is own) == (known_by is None)


def brevity(trajectories):
    return [1 / len(trajectory.steps) for trajectory in trajectories]


def with_solution(completions, solution):
    return []


def test_a_function_as_reward_asks_for_nothing():
    assert content(**OWN).keys() == {"questions", "corpus", "prompts"}
    with pytest.raises(ConfigError, match="requires solution, which reasonrag cannot give it"):
        tasks.open_task(settings(reward__name=f"python:{__name__}:with_solution"))


def test_a_judge_in_a_folder_is_named_by_its_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = tasks.judge_name(JudgeConfig(spec=f"hf:{tmp_path}"))
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert before.startswith(f"hf:{tmp_path.name}@") and before != tasks.judge_name(JudgeConfig(spec=f"hf:{tmp_path}"))
    assert tasks.judge_name(JudgeConfig(spec="python:some.module:make")) == "python:some.module:make"


@pytest.mark.parametrize(
    ("preset", "wrong", "told"),
    [
        ("demo-outcome", {"reward__name": "hiprga"}, "reward 'hiprga' is unknown; did you mean 'hiprag'"),
        ("demo-hiprag", {"judge__spec": None}, "reward hiprag needs a judge"),
        ("demo-search-p1", {}, "reward search-p1 needs reference plans; add --plans"),
        ("when-to-search", {}, "reward when-to-search needs a judge; add --judge"),
        ("demo-outcome", OWN | {"outcome__name": "f1"}, "brevity is a function, which gets no outcome; leave --out"),
    ],
)
def test_what_a_reward_lacks_is_noticed_at_once(preset, wrong, told):
    with pytest.raises(ConfigError, match=told):
        tasks.open_task(settings(preset, **wrong))


def test_plans_that_nobody_uses_are_refused(plans):
    for preset, more in (("demo-outcome", {}), ("demo-search-p1", {"reward__search_p1__reference_track": False})):
        with pytest.raises(ConfigError, match="does not use --plans"):
            tasks.open_task(settings(preset, plans=plans, **more))


@pytest.mark.parametrize("paper", sorted(name for name, paper in PAPERS.items() if paper.preset))
def test_every_variant_of_a_paper_has_what_its_reward_needs(paper, plans):
    assert PAPERS[paper].variants
    for variant in PAPERS[paper].variants:
        named = dict(setting.split("=") for setting in variant.settings)
        wanted = settings(PAPERS[paper].preset, **named, plans=plans if variant.plans else None)
        assert ("plans" in tasks.needs_of(wanted, tasks.open_format(wanted.as_config()))) == variant.plans


def carrying(folder, name, numbers):
    rows = [
        {
            "question": f"Who is {n}?",
            "golden_answers": [f"x{n}"],
            "metadata": {"context": [[f"T{n}", [f"{n} is x{n}."]]]},
        }
        for n in numbers
    ]
    file = folder / name
    file.write_text("".join(json.dumps({"id": str(n)} | row) + "\n" for n, row in zip(numbers, rows, strict=True)))
    return str(file)


def found(retriever, query):
    async def ask():
        (ranking,) = await retriever.search([query], 5)
        return {passage.title for passage in ranking}

    return asyncio.run(ask())


def test_held_out_paragraphs_are_not_found_in_training(tmp_path):
    named = {"data": carrying(tmp_path, "train.jsonl", range(10, 20)), "retrieval__cache": str(tmp_path / "cache")}
    dev = {"validation__data": carrying(tmp_path, "dev.jsonl", range(30, 40)), "validation__steps": 5}
    alone = tasks.open_task(settings(**named))
    task = tasks.open_task(settings(**named, **dev))
    assert task.content_of == alone.content_of | {"held_out": task.content_of["held_out"]}
    carrying(tmp_path, "dev.jsonl", range(50, 60))  # values of other questions cannot be compared
    assert tasks.open_task(settings(**named, **dev)).content_of["held_out"] != task.content_of["held_out"]
    assert (found(task.retriever, "30 x30"), found(task.retriever, "11 x11")) == (set(), {"T11"})
    _, own = tasks.batched_retrievers(task)
    assert (found(own, "30 x30"), found(own, "11 x11")) == ({"T30"}, set())
    asyncio.run(task.aclose())


def test_a_split_that_the_data_sets_name_is_not_validated_on():
    validated = {"limit": 20, "validation__steps": 5, "validation__limit": 6}
    named = tasks.open_task(settings("demo-outcome", data="demo:train", **validated))
    plain = tasks.open_task(settings("demo-outcome", **validated))
    assert [q.id for q in named.held_out] == [q.id for q in plain.held_out] != []
    assert all("-dev-" in q.id for q in named.held_out)


def test_a_judge_on_a_server_is_asked_for_its_name_and_weights_before_a_model_is_loaded():
    entry = {"id": "org/judge", "root": "/models/judge-7b"}
    with FakeOpenAI(models=(entry,)) as server:
        named = content(judge__spec=server.base_url)
        assert (named["judge"], named["judge_weights"]) == ("org/judge", "judge-7b")
        entry["root"] = "/models/judge-8b"
        assert content(judge__spec=server.base_url)["judge_weights"] == "judge-8b"
        with pytest.raises(ConfigError, match="does not serve 'another'"):
            content(judge__spec=server.base_url, judge__model="another")
    with pytest.raises(LLMError, match="no server answers at"):
        content(judge__spec=server.base_url)
