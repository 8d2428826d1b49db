"""A trained policy's folder to what goes up of it, and its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

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


def test_the_hub_data_set_it_was_trained_on_is_named_without_its_version(tmp_path):
    path = write_policy(tmp_path / "policy")
    named = "me/steps@v1.0.0:hotpotqa"
    edit_json(
        path / "training.json", lambda held: (held["data"].update(source=named), held["settings"].update(data=named))
    )
    assert card_of(staged(path)).data.datasets == ["me/steps"]
    edit_json(path / "training.json", lambda held: held["settings"].update(data="nq,popqa"))
    assert card_of(staged(path)).data.datasets is None  # pairs in a folder of that name
    edit_json(path / "training.json", lambda held: held.update(stage="rl"))
    assert card_of(staged(path)).data.datasets == ["RUC-NLPIR/FlashRAG_datasets"]


def test_an_adapter_names_its_model_and_a_place_on_this_machine_is_left_out(tmp_path):
    base = tmp_path / "models/mine"
    base.mkdir(parents=True)
    path = write_policy(tmp_path / "policy", adapter=True, base=str(base))
    found = staged(path, public=True, licence="mit")
    assert found.findings == []
    held = json.loads((found.upload.folder / "adapter_config.json").read_text())
    assert held == {"base_model_name_or_path": "mine", "peft_type": "LORA"}
    data = card_of(found).data.to_dict()
    assert (data["library_name"], data["license"]) == ("peft", "mit")
    assert "base_model" not in data
    assert "a local folder (checksum mine\\@0123456789ab) that is not part of this repository" in card_of(found).text


def test_a_merged_adapter_goes_up_as_a_whole_model(tmp_path):
    path = write_policy(tmp_path / "policy", adapter=True)
    with pytest.raises(InputError, match="has no folder merged"):
        staged(path, merged=True)
    write_policy(path / "merged")
    found = staged(path, merged=True)
    assert "model.safetensors" in found.files and "adapter_config.json" not in found.files
    assert card_of(found).data.to_dict()["base_model_relation"] == "finetune"


def test_figures_of_these_very_weights_are_metadata_with_their_intervals_in_the_text(tmp_path):
    path = write_policy(tmp_path / "policy")
    policies = {"base": "hf:b@aaaaaaaaaaaa", "x": f"hf:policy@{model_checksum(path)}"}
    found = card_of(staged(path, report=report(tmp_path / "eval", policies)))
    (result,) = found.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("em", 0.75, "demo")
    assert "| x | t0_s8_k1 | 20 | 0.750 [0.650, 0.850] |" in found.text
    assert "| x | t0_s8_k1 | base | 20 | +0.050 [-0.050, +0.150] |" in found.text


def test_figures_of_a_served_policy_are_shown_but_are_no_metadata(tmp_path):
    path = write_policy(tmp_path / "policy")
    found = card_of(staged(path, report=report(tmp_path / "eval", {"base": "b", "policy": "served-name"})))
    assert found.data.eval_results is None
    assert "matched by name" in found.text


def test_figures_of_other_weights_are_refused(tmp_path):
    path = write_policy(tmp_path / "policy")
    evaluation = report(tmp_path / "eval", {"base": "hf:b@aaaaaaaaaaaa", "policy": "hf:policy@bbbbbbbbbbbb"})
    with pytest.raises(ConfigError, match=r"0 policies of these weights.*'base', 'policy'"):
        staged(path, report=evaluation)
    with pytest.raises(ConfigError, match="was measured with weights bbbbbbbbbbbb"):
        staged(path, report=evaluation, name="policy")
    with pytest.raises(ConfigError, match="has no policy 'z'"):
        staged(path, report=evaluation, name="z")
    (evaluation / "metrics.json").write_text('{"policies": {"policy": 3}}')
    with pytest.raises(DataError, match=r"is not a metrics\.json"):
        staged(path, report=evaluation)


BAD = {
    "has not finished": lambda path: (path / "training.json").unlink(),
    "holds no finished training": lambda path: (path / "training.json").write_text("[]"),
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
