"""Settings of online training: presets, files, and contradictions in one line."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.online_rl import task as tasks
from reasonrag.online_rl.settings import RLSettings, load_rl_settings, rl_presets
from reasonrag.online_rl.train import _reject_sharded_weights, train_online
from tests.online_rl.toys import settings


@pytest.mark.parametrize("preset", sorted(rl_presets()))
def test_every_preset_can_be_loaded_and_divided_into_passes(preset):
    loaded = load_rl_settings(preset=preset)
    assert loaded.accumulation(1) >= 1
    assert preset.startswith("demo") or loaded.accumulation(8) >= 1, "on one node"
    assert load_rl_settings(overrides=flat(loaded)) == loaded


def flat(tree: RLSettings) -> dict[str, object]:
    return tree.model_dump(mode="json")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rollout__group_size": 1}, "algorithm grpo compares the trajectories of a question"),
        ({"rollout__group_size": 1, "algorithm": "ppo", "sampling__dynamic": True}, "sampling.dynamic compares"),
        ({"algorithm": "ppo", "credit": "step"}, "gives each token its own; leave credit out"),
        ({"rollout__group": 3}, "did you mean 'rollout.group_size'?"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"reward__hiprag__lambda_f": 2}, "less than or equal to 1"),
        ({"retrieval__corpus": "c.jsonl", "retrieval__url": "http://h:1"}, "both a corpus and a retrieval server"),
    ],
)
def test_a_contradiction_is_one_clear_line(wrong, told):
    with pytest.raises(ConfigError, match="configuration: ") as caught:
        settings(**wrong)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"credit": "step"}, "in format 'search_r1' a trajectory is one training row"),
        ({"format__name": "no_such"}, "format 'no_such' is unknown"),
        ({"data": None}, "no questions: add --dataset"),
        (
            {"format__name": "tool_calls", "reward__outcome__search_confidence": 0.4},
            "reads a search tag, and format 'tool_calls' has none",
        ),
        ({"judge__spec": "no-such"}, "names no backend"),
        ({"judge__spec": "extractive"}, "extractive cannot judge"),
    ],
)
def test_a_task_that_cannot_work_is_refused_before_anything_is_loaded(wrong, told):
    with pytest.raises(ConfigError, match=told):
        tasks.open_task(settings(**wrong))


@pytest.mark.parametrize(
    ("wrong", "processes", "told"),
    [
        ({"per_device_train_batch_size": 3}, 1, "16 rows, which 1 minibatches on 1 processes cannot divide"),
        ({"rollout__minibatches": 2}, 1, "cannot divide into passes of 16"),
        ({}, 3, "1 minibatches on 3 processes cannot divide"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(wrong, processes, told):
    with pytest.raises(ConfigError, match=told):
        settings(**wrong).accumulation(processes)


@pytest.mark.parametrize("name", ["num_iterations", "num_generations", "steps_per_generation", "use_vllm", "epsilon"])
def test_what_has_a_meaning_here_cannot_be_set_behind_its_back(name, tmp_path):
    wanted = settings(trainer={name: 2})
    with pytest.raises(ConfigError, match=f"trainer.{name} cannot be set"):
        train_online(wanted, tmp_path)


def test_the_policy_brings_its_format_and_prompts_and_flags_win():
    loaded = settings("demo-hiprag")
    assert (loaded.format.name, loaded.format.prompts, loaded.retrieval.top_k) == ("hiprag", "brief", 1)
    assert loaded.rollout.max_tokens == 32
    assert settings("demo-hiprag", retrieval__top_k=2, format__name="search_r1").retrieval.top_k == 2


def file(folder, name, numbers):
    rows = [{"id": str(n), "question": f"What is {n}?", "golden_answers": [str(n)]} for n in numbers]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "p", "contents": "Numbers\nNumbers are many."}) + "\n", encoding="utf-8")
    return {"data": str(folder / name), "retrieval__corpus": str(corpus), "validation__steps": 5}


def test_validation_takes_other_questions_than_those_of_training(tmp_path):
    named = file(tmp_path, "train.jsonl", range(10))
    file(tmp_path, "dev.jsonl", range(5, 15))
    task = tasks.open_task(settings(**named, validation__data=str(tmp_path / "dev.jsonl")))
    assert sorted(question.id for question in task.held_out) == ["10", "11", "12", "13", "14"]
    assert len(task.questions) == 10


def test_validation_on_the_questions_of_training_is_refused(tmp_path):
    named = file(tmp_path, "train.jsonl", range(10))
    with pytest.raises(ConfigError, match="validation has no question that is not trained on"):
        tasks.open_task(settings(**named, validation__data=named["data"]))


def test_the_demo_world_validates_on_its_dev_split():
    held_out = tasks.open_task(settings(validation__steps=5, validation__limit=3)).held_out
    assert len(held_out) == 3 and all("dev" in question.id for question in held_out)


@pytest.mark.parametrize(("fsdp", "deepspeed"), [("full_shard", None), ([], "zero3.json")])
def test_sharded_weights_make_no_rollouts_in_this_process(fsdp, deepspeed):
    with pytest.raises(ConfigError, match="--rollout-url"):
        _reject_sharded_weights(SimpleNamespace(fsdp=fsdp, deepspeed=deepspeed), "use --rollout-url")


@pytest.mark.parametrize(
    "asked", [{"ahead": True}, {"sleep": True}, {"ahead": True, "sleep": True, "url": "http://127.0.0.1:9/v1"}]
)
def test_rollouts_ahead_take_a_server_that_does_not_sleep(asked):
    with pytest.raises(ConfigError, match="--rollout-url"):
        settings(**{f"rollout__{name}": value for name, value in asked.items()})
