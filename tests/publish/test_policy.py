"""A trained policy's folder to what goes up of it, and its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from structlog.testing import capture_logs

from reasonrag.core.errors import ConfigError, DataError, InputError
from reasonrag.llm.model_folder import model_checksum
from reasonrag.publish.publish import PublishOptions, stage
from tests.publish.toys import edit_json, report, write_policy


def staged(path: Path, **wanted: object):
    folder = path.parent / "staged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return stage(path, folder, PublishOptions(repo_id="me/policy", **wanted))  # type: ignore[arg-type]


def card_of(found) -> ModelCard:
    return ModelCard.load(found.upload.folder / "README.md")


def test_weights_and_how_they_are_asked_go_up_and_no_pickle_journal_or_checkpoint(tmp_path):
    found = staged(write_policy(tmp_path / "policy"))
    assert sorted(found.files) == [
        *("README.md", "chat_template.jinja", "config.json", "curves.svg", "model.safetensors", "reasonrag.yaml"),
        *("tokenizer.json", "training.json"),
    ]
    assert found.findings == []
    data = card_of(found).data.to_dict()
    assert (data["base_model"], data["library_name"], data["license"]) == ("Qwen/Qwen2.5-7B", "transformers", "unknown")
    assert "(curves.svg)" in card_of(found).text


def test_the_labels_of_a_process_reward_model_go_up_with_its_weights(tmp_path):
    path = write_policy(tmp_path / "prm")
    (path / "prm.json").write_text("{}")
    assert "prm.json" in staged(path).files


def test_an_adapter_names_its_model_and_a_place_on_this_machine_is_left_out(tmp_path):
    base = tmp_path / "models/mine"
    base.mkdir(parents=True)
    path = write_policy(tmp_path / "policy", adapter=True, base=str(base))
    with capture_logs() as logs:
        found = staged(path, public=True, licence="mit")
    assert found.findings == [] and "which readers lack; publish what --merge makes" in logs[0]["event"]
    held = json.loads((found.upload.folder / "adapter_config.json").read_text())
    assert held == {"base_model_name_or_path": "mine", "peft_type": "LORA"}
    data = card_of(found).data.to_dict()
    assert (data["library_name"], data["license"]) == ("peft", "mit")
    assert "base_model" not in data
    assert "a local folder (checksum mine\\@0123456789ab) that is not part of this repository" in card_of(found).text


def test_metrics_of_these_very_weights_are_in_the_text_with_their_intervals(tmp_path):
    path = write_policy(tmp_path / "policy")
    policies = {"base": "hf:b@aaaaaaaaaaaa", "x": f"hf:policy@{model_checksum(path)}"}
    found = card_of(staged(path, report=report(tmp_path / "eval", policies)))
    assert "| x | t0_s8_k1 | 20 | 0.750 [0.650, 0.850] |" in found.text
    assert "| x | t0_s8_k1 | base | 20 | +0.050 [-0.050, +0.150] |" in found.text


def test_figures_of_other_weights_are_refused(tmp_path):
    path = write_policy(tmp_path / "policy")
    evaluation = report(tmp_path / "eval", {"base": "hf:b@aaaaaaaaaaaa", "policy": "hf:policy@bbbbbbbbbbbb"})
    with pytest.raises(ConfigError, match=r"has no policy with these weights .*it has 'base', 'policy'"):
        staged(path, report=evaluation)
    (evaluation / "metrics.json").write_text('{"policies": {"policy": 3}}')
    with pytest.raises(DataError, match=r"is not a metrics\.json"):
        staged(path, report=evaluation)


BAD = {
    "neither a finished run": lambda path: (path / "training.json").unlink(),
    "training.json cannot be read": lambda path: (path / "training.json").write_text("[]"),
    "no weights in safetensors": lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
    "config.json cannot be read": lambda path: (path / "config.json").write_text("["),
}


@pytest.mark.parametrize("expected", BAD)
def test_a_folder_that_cannot_be_published_is_refused_in_one_line(tmp_path, expected):
    path = write_policy(tmp_path / "policy")
    BAD[expected](path)
    with pytest.raises(InputError, match=expected) as error:
        staged(path)
    assert "\n" not in str(error.value)


def test_a_training_of_another_version_still_has_a_card(tmp_path):
    path = write_policy(tmp_path / "policy")
    edit_json(path / "training.json", lambda held: (held.clear(), held.update(identity={}, history=3, model="x")))
    assert "unknown" in card_of(staged(path)).text
