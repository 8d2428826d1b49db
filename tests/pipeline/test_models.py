from __future__ import annotations

import shutil

import huggingface_hub.constants
import pytest

from reasonrag.core.config import Config, ModelConfig
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.models import demo_folder
from reasonrag.llm.chat_template import template_identity
from reasonrag.llm.model_folder import model_commit
from reasonrag.pipeline.parts import check_llm, commits, open_llm
from reasonrag.storage.folder import RunFolder
from tests.llm.tiny import save_tiny_model

OWN = """
import json, sys
def raises(config):
    return json.loads("{")
def ends(config):
    sys.exit(3)
def none(config):
    return None
def picky():
    return None
"""
IMPORTED = r"cannot be imported: its code fails at \S+own_\d+\.py"
CALLED = r"cannot be called: its code fails at \S+own_\d+\.py"


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("def f(:", "f", IMPORTED + ":1; mend it there: SyntaxError"),
        ("\nimport nosuch", "f", IMPORTED + ":2; .*ModuleNotFoundError: No module named"),
        (OWN, "raises", CALLED + ":4; mend it there: JSONDecodeError"),
        (OWN, "ends", CALLED + ":6; mend it there: SystemExit: 3"),
        (OWN, "none", r"returns NoneType, which lacks name, complete, aclose; docs/extend.md"),
        (OWN, "picky", r"cannot be called: name a class or function .* TypeError: picky\(\) takes 0"),
    ],
)
def test_code_of_others_that_fails_is_refused_with_its_place(module, name, message, tmp_path, monkeypatch):
    file = tmp_path / f"own_{len(module + name + message)}.py"
    file.write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_llm(ModelConfig(spec=f"python:{file.stem}:{name}"), "policy")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["http://127.0.0.1:9/v1", "extractive", "demo"])
def test_a_chat_template_is_refused_where_it_would_change_nothing(spec):
    with pytest.raises(ConfigError, match=r"a chat template is for hf: and vllm: models.*policy.api=completions"):
        named = "m" if spec.startswith("http") else None
        check_llm(ModelConfig(spec=spec, model=named, chat_template="gemma"), "policy")


def test_the_name_of_a_model_is_refused_where_no_server_needs_it():
    with pytest.raises(ConfigError, match="demo is no server that needs the name of a model; leave 'm' out"):
        open_llm(ModelConfig(spec="demo", model="m"), "policy")


def test_another_text_of_a_chat_template_is_another_policy(tmp_path):
    assert template_identity(None) == ""
    file, names = tmp_path / "own.jinja", set()
    for text in ("{{ messages }}", "{{ messages }}!"):
        file.write_text(text)
        names.add(template_identity(str(file)))
    assert len(names) == 2 and all(name.startswith("+own@") for name in names)


@pytest.mark.slow
def test_other_weights_of_the_same_shape_are_another_policy(tmp_path):
    folder = shutil.copytree(demo_folder(), tmp_path / "policy")
    spec = ModelConfig(spec=f"hf:{folder}")
    before = open_llm(spec, "policy").name
    assert open_llm(spec, "policy").name == before
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert open_llm(spec, "policy").name != before


@pytest.fixture
def two_threads():
    """torch as it is where nobody has set its threads: more than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def name_of(folder) -> str:
    """What identifies the policy in a folder; it is loaded for that."""
    return open_llm(ModelConfig(spec=f"hf:{folder}", device="cpu"), "policy").name


@pytest.mark.slow
def test_what_training_leaves_beside_a_model_is_not_part_of_it(tmp_path):
    folder = save_tiny_model(tmp_path / "policy")
    before = name_of(folder)
    for byproduct in ("training.json", "trainer_state.json", "curves.svg", "curves.png", "report.md", ".lock"):
        (folder / byproduct).write_text("{}")
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "model.safetensors").write_bytes(b"x")
    assert name_of(folder) == before


LOADED = "chat_template.jinja generation_config.json tokenizer_config.json vocab.txt tokenizer.model modeling_own.py"


@pytest.mark.slow
def test_whatever_a_loader_reads_is_part_of_a_model(tmp_path):
    folder = save_tiny_model(tmp_path / "policy")
    names = {name_of(folder)}
    for number, file in enumerate([*LOADED.split(), "reasonrag.yaml"], 2):
        content = (folder / file).read_text() if (folder / file).exists() else ""
        (folder / file).write_text(content + ("format: {prompts: brief}" if file.endswith(".yaml") else " "))
        names.add(name_of(folder))
        assert len(names) == number, file


@pytest.mark.slow
def test_an_adapter_is_another_policy_with_other_weights_and_on_another_model(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = save_tiny_model(tmp_path / "base"), tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / file, adapter / file)
    names = [name_of(adapter)]
    assert names[0].startswith("hf:adapter@") and name_of(adapter) == names[0]
    for weights in (adapter / "adapter_model.safetensors", base / "model.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        names.append(name_of(adapter))
    assert len(set(names)) == 3


@pytest.mark.slow
def test_a_small_model_on_the_cpu_runs_on_one_thread_whoever_asks_for_it(tmp_path, two_threads):
    import torch

    name_of(save_tiny_model(tmp_path / "policy"))
    assert torch.get_num_threads() == 1


def test_the_demo_policy_is_no_judge_and_the_error_names_one():
    with pytest.raises(ConfigError, match=r"demo cannot judge.*demo-judge"):
        open_llm(ModelConfig(spec="demo"), "judge")


def test_what_cannot_be_loaded_is_seen_without_loading(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'runs/none' cannot be loaded: .*; nor is there a folder of that name"):
        check_llm(ModelConfig(spec="hf:runs/none"), "policy")
    with pytest.raises(ConfigError, match="there is no model in that folder"):
        check_llm(ModelConfig(spec=f"hf:{tmp_path}"), "policy")
    with pytest.raises(ConfigError, match="no folder"):
        check_llm(ModelConfig(spec=f"hf:{tmp_path / 'gone'}"), "policy")
    with pytest.raises(ConfigError, match="NAME=URL#MODEL"):
        open_llm(ModelConfig(spec="http://127.0.0.1:9/v1"), "policy")
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="does not name the adapter's model"):
        check_llm(ModelConfig(spec=f"hf:{tmp_path}"), "policy")
    check_llm(ModelConfig(spec="demo"), "policy")


def test_a_hub_model_whose_branch_has_moved_is_another_one_if_both_commits_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)

    def moved_to(commit: str) -> dict[str, str]:
        shutil.copytree(demo_folder(), cached / "snapshots" / commit)
        (cached / "refs" / "main").write_text(commit)
        policy = open_llm(ModelConfig(spec="hf:org/tiny", device="cpu"), "policy")
        assert policy.name == "hf:org/tiny"  # by which the journal knows replies
        return commits(policy=policy, judge=None)

    begun, now = moved_to("a" * 40), moved_to("b" * 40)
    assert begun == {"policy_commit": "a" * 40} and model_commit(str(demo_folder())) is None
    with RunFolder(tmp_path / "run", Config(), {"policy": "hf:org/tiny"}).open() as old:
        old.bind()
    hashes = {old.config_hash}
    for content in (begun, {}, begun):  # an old run gets a commit, and keeps what its pairs are named by
        with RunFolder(tmp_path / "run", Config(), {"policy": "hf:org/tiny", **content}).open() as run:
            hashes.add(run.config_hash)
    assert len(hashes) == 1
    with (
        pytest.raises(RunError, match=r"content\.policy_commit: 'a{40}' there, 'b{40}' now"),
        RunFolder(tmp_path / "run", Config(), {"policy": "hf:org/tiny", **now}).open(),
    ):
        pass
