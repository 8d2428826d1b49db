"""Weights as they leave the trainer: with adapters merged, whole, under the base model's names; the model as before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.core.models import demo_folder
from reasonrag.llm.weight_sync import merged_parameters


@pytest.fixture(scope="module")
def policy() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)


def adapted(policy: Any, **settings: Any) -> Any:
    """The policy with adapters that change something: PEFT begins with ones that do not."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        copy.deepcopy(policy), LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "w1"]} | settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (1.0 if "lora_" in name else 0.1))
    return model


def snapshot(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def check(model: Any) -> None:
    """The pushed tensors are those of `merge_and_unload`, and not a bit of the model has changed."""
    import torch

    before = snapshot(model)
    pushed = {name: tensor.clone() for name, tensor in merged_parameters(model)}
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert pushed.keys() == merged.keys()
    for name, tensor in pushed.items():
        assert torch.allclose(tensor, merged[name], rtol=0, atol=1e-6), name
    after = snapshot(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not any(getattr(module, "merged_adapters", ()) for module in model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"modules_to_save": ["ffn_norm"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["in_proj", "out_proj"]},
        {"trainable_token_indices": [3, 5]},
    ],
    ids=["lora", "modules_to_save", "tied head", "one name in two kinds", "tokens"],
)
def test_merged_tensors_are_those_of_a_merged_model_and_the_model_is_unchanged(policy: Any, settings: dict[str, Any]):
    check(adapted(policy, **settings))


def test_a_bare_model_gives_each_of_its_weights_once_and_no_copies(policy: Any):
    pushed = dict(merged_parameters(policy))
    assert pushed.keys() == dict(policy.named_parameters()).keys()
    assert all(tensor.data_ptr() == policy.get_parameter(name).data_ptr() for name, tensor in pushed.items())


def test_quantised_weights_and_prompt_adapters_are_refused(policy: Any):
    import torch
    from peft import PromptTuningConfig, get_peft_model

    quantised = torch.nn.Module()
    quantised.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantised"):
        next(merged_parameters(quantised))
    prompts = get_peft_model(copy.deepcopy(policy), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="learns prompts"):
        next(merged_parameters(prompts))


@pytest.mark.parametrize("lora", [False, True])
def test_weights_that_fsdp2_has_sharded_come_whole(policy: Any, lora: bool, tmp_path: Path):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = adapted(policy) if lora else copy.deepcopy(policy)
    expected = {name: tensor.clone() for name, tensor in merged_parameters(model)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        pushed = dict(merged_parameters(model))
    finally:
        dist.destroy_process_group()
    assert pushed.keys() == expected.keys()
    for name, tensor in pushed.items():
        assert not hasattr(tensor, "full_tensor"), name
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-6), name
