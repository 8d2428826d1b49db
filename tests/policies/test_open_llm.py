from __future__ import annotations

import shutil

import pytest

from reasonrag.config import ModelConfig
from reasonrag.demo import policy_folder
from reasonrag.errors import ConfigError
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.policies import open_llm


def scripted(config: ModelConfig) -> ScriptedLLM:
    return ScriptedLLM([], name=f"scripted by {config.spec}")


def test_a_model_of_ones_own_is_named_by_module_and_factory():
    spec = f"python:{__name__}:scripted"
    assert open_llm(ModelConfig(spec=spec), "policy").name == f"scripted by {spec}"


@pytest.mark.parametrize("path", ["no.such.module:x", "json:nothing", "json", ""])
def test_a_factory_that_is_not_there_is_refused(path):
    with pytest.raises(ConfigError, match="cannot be imported"):
        open_llm(ModelConfig(spec=f"python:{path}"), "policy")


@pytest.mark.slow
def test_other_weights_of_the_same_shape_are_another_policy(tmp_path):
    folder = shutil.copytree(policy_folder(), tmp_path / "policy")
    spec = ModelConfig(spec=f"hf:{folder}")
    before = open_llm(spec, "policy").name
    assert open_llm(spec, "policy").name == before
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert open_llm(spec, "policy").name != before
