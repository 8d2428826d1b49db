"""What is left when a training ends: an adapter that works as it is and merged, its card, figures, curves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import adapter_base
from reasonrag.online_rl.settings import RLSettings
from reasonrag.publish.verify import verify
from reasonrag.training.model import merge_adapter
from reasonrag.training.run import identity_of, last_checkpoint, mark_complete, summarise
from tests.training.toys import dpo_settings, save_calm_model, train, write_pairs

pytestmark = pytest.mark.usefixtures("undrawn")

CARD = "format: {name: reasonrag, prompts: brief}\nretrieval: {top_k: 2}\n"
LORA = {"method": "lora", "lora.r": 4, "lora.alpha": 8, "max_steps": 4, "learning_rate": 5e-3, "merge": True}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = save_calm_model(tmp_path_factory.mktemp("policy"))
    (folder / "reasonrag.yaml").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


@pytest.fixture(scope="module")
def adapter(policy, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "dpo"
    train(dpo_settings(data, policy, **LORA), out, log=lambda line: None)
    return out


def logits(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return model(input_ids=torch.randint(0, model.config.vocab_size, (2, 40), generator=generator)).logits


def test_the_merged_model_is_the_adapter_on_its_model(adapter, policy):
    merged, with_adapter, before = logits(adapter / "merged"), logits(adapter), logits(policy)
    assert (with_adapter - before).abs().max() > 1e-2
    assert (merged - with_adapter).abs().max() <= 1e-5


def test_the_merged_folder_is_a_plain_one(adapter, policy):
    names = {path.name for path in (adapter / "merged").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "reasonrag.yaml"}
    assert not any("adapter" in name for name in names)
    assert not (adapter / "README.md").exists()
    generation = [
        json.loads((folder / "generation_config.json").read_text()) for folder in (policy, adapter / "merged")
    ]
    assert generation[0]["top_k"] == generation[1]["top_k"] == 5
    assert (adapter / "merged" / "reasonrag.yaml").read_text() == CARD
    assert (adapter / "reasonrag.yaml").read_text() == CARD


def test_an_adapter_is_trained_further_against_a_frozen_copy_of_itself(adapter, data, tmp_path):
    settings = dpo_settings(
        data, adapter, method="lora", max_steps=4, save_steps=2, learning_rate=5e-3, loss_type="sigmoid"
    )
    summary = train(settings, tmp_path / "more", log=lambda line: None)
    assert summary["history"][0]["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert summary["final"]["train"]["rewards/margins"] > 0
    assert not (tmp_path / "more" / "ref").exists()
    assert (logits(tmp_path / "more") - logits(adapter)).abs().max() > 1e-3


@pytest.mark.slow
def test_going_on_with_an_adapter_of_an_adapter_keeps_the_reference(adapter, data, tmp_path):
    import os
    import signal

    from reasonrag.core.errors import Interrupted

    settings = dpo_settings(data, adapter, method="lora", max_steps=4, save_steps=100, learning_rate=5e-3)

    def log(line):
        if line.startswith("step 2/"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(settings, tmp_path / "cut", log=log)
    cut = train(settings, tmp_path / "cut", log=lambda line: None)
    whole = train(settings, tmp_path / "whole", log=lambda line: None)
    assert cut["final"]["train"]["loss"] == pytest.approx(whole["final"]["train"]["loss"], abs=1e-4)


def test_an_adapter_cannot_be_trained_in_full(adapter, data, tmp_path):
    with pytest.raises(ConfigError, match=r"is a LoRA adapter.*merge it first"):
        train(dpo_settings(data, adapter), tmp_path / "out", log=lambda line: None)


def test_a_finished_adapter_is_merged_when_that_is_asked_for_later(policy, data, tmp_path):
    options = LORA | {"max_steps": 1}
    train(dpo_settings(data, policy, **options | {"merge": False}), tmp_path / "out", log=lambda line: None)
    assert not (tmp_path / "out" / "merged").exists()
    train(dpo_settings(data, policy, **options), tmp_path / "out", log=lambda line: None)
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()


def test_an_adapter_whose_model_is_gone_says_so(adapter, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/no/such/model"}))
    with pytest.raises(ConfigError, match="/no/such/model"):
        merge_adapter(folder, tmp_path / "merged", chat=ChatTemplate.load(str(folder)))
    assert not (tmp_path / "merged").exists()


def test_an_adapter_whose_configuration_leaves_out_tensors_is_refused(adapter, tmp_path):
    file = shutil.copytree(adapter, tmp_path / "adapter") / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"target_modules": config["target_modules"][1:]}))
    with pytest.raises(ConfigError, match=r"leaves out \d+ tensors of the adapter"):
        adapter_base(file.parent)
    assert any("leaves out" in problem for problem in verify(file.parent).problems)
    file.write_text(json.dumps(config))
    (file.parent / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds a whole model and an adapter on another one"):
        adapter_base(file.parent)


def test_a_training_whose_folder_is_moved_says_so_and_goes_on_there(policy, data, tmp_path):
    settings = dpo_settings(data, policy, max_steps=4, save_steps=1)

    def move(line):
        if line.startswith("step 2/") and not (tmp_path / "moved").exists():
            (tmp_path / "out").rename(tmp_path / "moved")

    with pytest.raises(RunError, match="was deleted or replaced while this training wrote to it"):
        train(settings, tmp_path / "out", log=move)
    assert train(settings, tmp_path / "moved", log=move)["steps"] == 4


def test_mixed_precision_is_said_and_kept_in_the_summary(policy, data, tmp_path):
    lines = []
    summary = train(
        dpo_settings(data, policy, max_steps=1, **{"trainer.bf16": True}), tmp_path / "out", log=lines.append
    )
    assert summary["mixed_precision"] == "bf16" and any("mixed precision: bf16" in line for line in lines)


def test_an_adapter_on_other_weights_than_it_was_trained_on_is_no_sound_policy(policy, data, tmp_path, monkeypatch):
    base, out = shutil.copytree(policy, tmp_path / "base"), tmp_path / "dpo"
    monkeypatch.chdir(tmp_path)
    train(dpo_settings(data, "base", **LORA | {"max_steps": 1, "merge": False}), out, log=lambda line: None)
    assert verify(out).problems == []
    (base / "model.safetensors").write_bytes((out / "adapter_model.safetensors").read_bytes())
    (problem,) = verify(out).problems
    assert f"was trained on a model with other files than {base} has;" in problem


@pytest.mark.slow
def test_merging_a_bfloat16_model_rounds_once(policy, data, tmp_path):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(policy).save_pretrained(half)
    train(dpo_settings(data, half, **LORA | {"dtype": "bfloat16"}), tmp_path / "out", log=lambda line: None)
    exact = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    exact = PeftModel.from_pretrained(exact, str(tmp_path / "out")).merge_and_unload().state_dict()
    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in merged.values())
    assert all((exact[name].to(torch.bfloat16) == value).all() for name, value in merged.items())


def test_training_json_names_no_place(tmp_path):
    (tmp_path / "mine").mkdir()
    here, host = str(tmp_path / "mine"), "http://10.1.2.3:8000/v1"
    settings = RLSettings.model_validate(
        {
            "data": here,
            "model": here,
            "plans": here,
            "retrieval": {"url": [host, "https://Corpus.Example/retrieve"], "cache": "~/.cache/reasonrag"},
            "judge": {"spec": f"hf:{here}"},
            "format": {"prompts": here},
            "rollout": {"url": "http://localhost:8001/v1"},
            "validation": {"data": "/gone/dev.jsonl"},
            "reward": {"when_to_search": {"encoder": here}},
            "trainer": {"logging_dir": here, "model_init_kwargs": {"offload": [here]}, "vllm_server_host": "10.1.2.3"},
        }
    )
    state = type("State", (), {"log_history": [], "global_step": 1, "epoch": 1.0, "num_input_tokens_seen": 0})()
    described = identity_of("rl", settings, content="c", model="m")
    summary = summarise(state, settings, described, seconds=1.0, data={}, model={"name": "mine"})
    text = json.dumps(summary, ensure_ascii=False)
    for place in (str(tmp_path), str(Path.home()), "/gone", "10.1.2.3", "localhost", "Corpus.Example", "~"):
        assert place not in text
    shown = summary["settings"]
    assert (shown["data"], shown["plans"], shown["format"]["prompts"]) == ("mine", "mine", "mine")
    assert (shown["judge"]["spec"], shown["retrieval"]["url"]) == ("hf:mine", ["http://…", "https://…"])
    assert shown["validation"]["data"] == "dev.jsonl"


def checkpoint(out: Path, step: int) -> Path:
    folder = out / "checkpoints" / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    (folder / "inner" / "part").write_bytes(b"1" * 10)
    return folder


def test_the_last_checkpoint_is_the_latest_whole_one(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (5, 20, 100, 200):
        mark_complete(checkpoint(tmp_path, step), seconds=1.0)
    checkpoint(tmp_path, 300)
    assert last_checkpoint(tmp_path).name == "checkpoint-200"
    said = []
    (tmp_path / "checkpoints" / "checkpoint-200" / "model.safetensors").write_bytes(b"1" * 100)
    assert last_checkpoint(tmp_path, said.append).name == "checkpoint-100"
    assert said[0].startswith("checkpoint-300 is left out: complete.json is missing")
    assert said[1] == "checkpoint-200 is left out: model.safetensors is damaged: its checksum differs"
    (tmp_path / "checkpoints" / "checkpoint-200" / "inner" / "part").write_bytes(b"1")
    assert last_checkpoint(tmp_path).name == "checkpoint-100"
    (tmp_path / "checkpoints" / "checkpoint-100" / "model.safetensors").unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-20"
    (tmp_path / "checkpoints" / "checkpoint-20" / "complete.json").write_text("{")
    assert last_checkpoint(tmp_path).name == "checkpoint-5"


@pytest.mark.fault(
    "power cut",
    "right after a checkpoint counts, and older ones are removed",
    "all of its files were on disk before the marker that makes it count",
    before="none was: both checkpoints could be lost",
)
def test_a_checkpoint_is_on_disk_before_it_counts(tmp_path, monkeypatch, figure):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    mark_complete(checkpoint(tmp_path, 1), seconds=1.0)
    *files, marker, folder = synced
    figure(f"synced: {', '.join(sorted(files))}, then the marker and the folder")
    assert sorted(files) == ["model.safetensors", "part"]
    assert marker.startswith(".complete.json") and folder == "checkpoint-1"
