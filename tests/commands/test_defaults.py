"""Commands in an empty folder: what they take and where they write if nothing is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from reasonrag.commands.train import online_defaults, with_pairs_and_model
from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import dump
from reasonrag.online_rl.settings import load_rl_settings
from reasonrag.storage.folder import RunFolder, first_usable
from reasonrag.training.run import CHECKPOINTS, TrainingFolder
from reasonrag.training.settings import DPOSettings, SFTSettings
from tests.docs.story import run_here

NO_GPU = DPOSettings(device="cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished_run(name, *, age_s=0, **overrides):
    """A folder in runs/ with what the defaults read of a run."""
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(load_config(overrides=overrides)))
    (run / "run.json").write_text(json.dumps({"pairs": {"total": 1234}}))
    made = (run / "run.json").stat().st_mtime - age_s
    os.utime(run / "run.json", (made, made))
    return str(run)


def finished_policy(name, data):
    policy = Path("runs") / name
    policy.mkdir(parents=True)
    (policy / "config.yaml").write_text(dump(DPOSettings(data=data, model="demo")))
    (policy / "training.json").write_text(json.dumps({"stage": "dpo"}))
    return str(policy)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("build-tree --dataset hotpotqa", ("Qwen/Qwen2.5-7B-Instruct", "http://HOST", "hf:", "extractive", "demo")),
        ("dpo train", ("build-tree --dataset", "--data")),
        ("sft train", ("build-tree --dataset", "--data")),
        ("rl train", ("dpo train", "demo-outcome", "--dataset")),
        ("rl train --preset hiprag --dataset none.jsonl", ("Qwen/Qwen2.5-3B-Instruct", "--model", "demo")),
        ("rl train --dataset none.jsonl", ("Qwen/Qwen2.5-7B-Instruct", "--model", "demo")),
        ("build-tree --dataset hotpotqa --policy extractive", ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa.jsonl")),
    ],
)
def test_in_an_empty_folder_without_gpu_and_hub_one_line_names_the_choices(command, named, here):
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    code, printed, said = run_here(here, command.split(), environment)
    line = said.splitlines()[-1]
    assert (code, printed) == (2, "") and line.startswith("error: ")
    assert all(word in line for word in named)
    assert list(here.iterdir()) == []


def test_a_command_without_out_resumes_its_run_and_leaves_those_of_others_alone():
    def write(config, *, bound=True):
        out = RunFolder.unnamed("my set", config, {"questions": "q"})
        with RunFolder(out, config, {"questions": "q"}).open() as run:
            if bound:
                run.bind()
        return str(out)

    first, other = load_config(), load_config(overrides={"seed": 1})
    Path("runs/my-set-2").mkdir(parents=True)
    Path("runs/my-set-2/note.txt").write_text("mine")
    assert [write(first), write(other), write(first)] == ["runs/my-set", "runs/my-set-3", "runs/my-set"]
    faster = load_config(overrides={"policy.concurrency": 3, "pairs.min_margin": 0.5})
    assert write(faster) == "runs/my-set", "what cannot change a result changes no folder"
    assert write(load_config(overrides={"seed": 2}), bound=False) == "runs/my-set-4"
    assert write(load_config(overrides={"seed": 3})) == "runs/my-set-4", "a start that failed holds nothing"


def test_a_training_run_without_out_resumes_what_an_interrupted_start_left():
    described = {"seed": 0}
    (Path("runs/a-dpo") / CHECKPOINTS).mkdir(parents=True)
    assert first_usable("a-dpo", TrainingFolder, described, NO_GPU) == Path("runs/a-dpo")
    Path("runs/a-dpo/training.json").write_text(json.dumps({"identity": described}))
    assert first_usable("a-dpo", TrainingFolder, described, NO_GPU) == Path("runs/a-dpo")
    assert first_usable("a-dpo", TrainingFolder, {"seed": 1}, NO_GPU) == Path("runs/a-dpo-2")


@pytest.mark.parametrize("name", ["", "..", "/etc", "a/../../b", "données 2", "-x"])
def test_a_name_from_data_stays_in_runs(name):
    folder = first_usable(name, TrainingFolder, {}, NO_GPU)
    assert folder.parent == Path("runs") and not folder.name.startswith((".", "-"))


def test_the_newest_finished_run_is_trained_on_with_the_policy_that_acted_there():
    finished_run("old", age_s=500, **{"policy.spec": "hf:models/mine"})
    new = finished_run("deep/new", age_s=90, **{"policy.spec": "demo"})
    lines = []
    chosen = with_pairs_and_model(NO_GPU, lines.append)
    assert (chosen.data, chosen.model) == (new, "demo")
    assert lines[0] == "data: runs/deep/new, the newest finished run in runs/ (1,234 pairs)"
    assert lines[1].startswith("model: demo, which wrote these pairs")
    named = NO_GPU.model_copy(update={"data": "runs/old"})
    assert with_pairs_and_model(named, lines.append).model == "models/mine"
    Path("models/mine").mkdir(parents=True)
    Path("models/mine/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="which wrote these pairs, is not in models/mine here; name it with --model"):
        with_pairs_and_model(named, lines.append)
    both = SFTSettings(data="a.jsonl", model="m")
    assert with_pairs_and_model(both, lines.append) == both and len(lines) == 3


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        ({"policy.spec": "http://h/v1", "policy.model": "Qwen/Qwen2.5-3B-Instruct"}, "Qwen/Qwen2.5-3B-Instruct"),
        ({"policy.spec": "http://h/v1", "policy.model": "gpt-4o"}, "Qwen/Qwen2.5-7B-Instruct"),
        ({"policy.spec": "extractive"}, "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_a_model_of_the_hub_that_nobody_named_needs_a_gpu(overrides, model):
    finished_run("a", **overrides)
    with pytest.raises(ConfigError, match=f"no GPU for {model}"):
        with_pairs_and_model(NO_GPU, lambda line: None)


def test_a_learning_rate_that_is_not_given_is_that_of_the_method_and_a_preset_keeps_its_own():
    rates = [DPOSettings(), DPOSettings(method="full"), SFTSettings(), SFTSettings(method="full")]
    assert [settings.learning_rate for settings in rates] == [1e-5, 1e-6, 2e-4, 1e-5]
    assert "learning_rate: 1.0e-05" in dump(DPOSettings())
    assert load_rl_settings(preset="hiprag", overrides={"method": "lora"}).learning_rate == 5e-7


def test_online_training_goes_on_from_the_newest_dpo_policy_on_the_questions_of_its_run():
    searched = {"retrieval.corpus": "corpus.jsonl", "retrieval.top_k": 5, "questions.limit": 9, "seed": 4}
    run = finished_run("mine", **{"questions.dataset": "mine.jsonl", "policy.spec": "demo", **searched})
    policy = finished_policy("mine-dpo", run)
    lines = []
    chosen = online_defaults({"retrieval": {"top_k": 2}}, lines.append)
    assert chosen["min_questions"] == 30, "as its pairs were asked for"
    assert chosen["model"] == policy and chosen["data"] == "mine.jsonl"
    assert chosen["retrieval.corpus"] == "corpus.jsonl" and "retrieval.top_k" not in chosen
    assert (chosen["limit"], chosen["seed"]) == (9, 4), "the same sample"
    assert policy in lines[0] and run in lines[1]
    assert online_defaults({"model": policy, "seed": 1}, lines.append)["data"] == "mine.jsonl"
    assert "retrieval.corpus" not in online_defaults({"model": policy, "retrieval": {"url": ["u"]}}, lines.append)
    assert online_defaults({"model": "demo:hiprag"}, lines.append) == {}
