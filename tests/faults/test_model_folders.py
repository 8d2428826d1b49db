"""Folders of models that were damaged, or made to harm: one clear error, no hang, no memory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import adapter_base, model_identity
from reasonrag.pipeline.parts import open_llm
from reasonrag.publish.verify import verify
from tests.faults.matrix import Figure, Rounds
from tests.llm.tiny import save_tiny_model

DEEP = "[" * 3_000_000
NESTED_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
TOO_MUCH = "takes more than 2 s or 512 MiB"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def damaged(model: Path, folder: Path, name: str, text: str) -> str:
    """Return a copy of a model's folder in which one file has that text."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.fault(
    "A11",
    "tokenizer.json, its configuration or an adapter's of 3,000,000 `[`, cut, empty, binary, or of another kind",
    "one line that names the folder",
    before="RecursionError traceback",
)
def test_files_of_a_model_that_cannot_be_read(tiny_model: Path, tmp_path: Path, figure: Figure) -> None:
    texts = (DEEP, '{"a":' * 500_000, "", "\0" * 100, "[]", "7", '{"model": {}}', '{"added_tokens": [1]}')
    refused = 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for text in texts[: 8 if name == "tokenizer.json" else 6]:
            folder = damaged(tiny_model, tmp_path / "model", name, text)
            with pytest.raises(ConfigError) as caught:
                ChatTemplate.load(folder)
            assert "cannot be loaded: " in str(caught.value) or "no chat template" in str(caught.value)
            assert folder in str(caught.value) and "\n" not in str(caught.value)
            refused += 1
    for text in texts[:6]:
        folder = damaged(tiny_model, tmp_path / "model", "adapter_config.json", text)
        with pytest.raises(ConfigError, match="does not name the adapter's model"):
            adapter_base(Path(folder))
        refused += 1
    figure(f"{refused} of {refused} refused in one line")


@pytest.mark.fault("A11", "an adapter whose patterns of modules take hours to match", "refused with the setting's name")
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "([a-z_0-9.]+)+!"},
        {"target_modules": ["q_proj"], "rank_pattern": {"((a|b)*){2,}": 4}},
        {"target_modules": ["q_proj"], "exclude_modules": [".*" * 14 + "zzz"]},
        {
            "target_modules": r"(?:.*?(?:text).*?(?:attn).*?(?:q_proj|up_proj).*?)|m\.layers\.[\d]{1,}\.q_proj",
            "rank_pattern": {"q_proj": 4},
        },
    ],
)
def test_an_adapters_pattern_that_may_never_end_is_refused(
    tmp_path: Path, fields: dict[str, object], figure: Figure
) -> None:
    config = {"base_model_name_or_path": "org/model", **fields}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    if "layers" in str(fields):
        assert adapter_base(tmp_path) == "org/model"
        return
    with pytest.raises(
        ConfigError, match=r"a pattern of (target_modules|rank_pattern|exclude_modules) repeats a group"
    ):
        adapter_base(tmp_path)
    figure("refused by its configuration, before the model is loaded")


@pytest.mark.fault("A11", "an index of weights that names a pickle, another folder's file, or a lost one", "refused")
@pytest.mark.parametrize("name", ["evil.bin", "../outside.safetensors", "model-2.safetensors"])
def test_an_index_of_weights_names_files_beside_it(name: str, tiny_model: Path, tmp_path: Path, figure: Figure) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": name}}
    folder = Path(damaged(tiny_model, tmp_path / "model", "model.safetensors.index.json", json.dumps(index)))
    for outside in ("evil.bin", "../outside.safetensors"):
        (folder / outside).write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=rf"names {re.escape(name)}, and no file of safetensors there"):
        model_identity(str(folder))
    (problem,) = (line for line in verify(folder).problems if "names" in line)
    figure(problem)


@pytest.mark.fault(
    "A11",
    "a chat template that loops for hours, makes a text of 10 GB, or doubles one 40 times",
    "the model is refused within 2 s of CPU and 512 MiB, which a child process spends",
    before="did not end in 45 s",
)
def test_a_chat_template_that_takes_too_much(tiny_model: Path, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    costly = ["{{ 'x' * 10**10 }}", GROWING, "{% for i in range(99999) %}0123456789{% endfor %}", NESTED_LOOPS]
    refused = 0
    for template in costly[: rounds(3, 4)]:
        folder = damaged(tiny_model, tmp_path / "model", "chat_template.jinja", template)
        with pytest.raises(ConfigError, match=TOO_MUCH):
            ChatTemplate.load(folder)
        refused += 1
    for template, reason in {
        "{% for i in range(10**9) %}{% endfor %}": "Range too big",
        "{{ ''.__class__.__mro__ }}": "unsafe",
        "{{ messages.append(1) }}": "append",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "recursion",
    }.items():
        folder = damaged(tiny_model, tmp_path / "model", "chat_template.jinja", template)
        with pytest.raises(ConfigError, match=f"cannot show a chat: .*{reason}"):
            ChatTemplate.load(folder)
        refused += 1
    figure(f"{refused} of {refused} templates refused; Jinja's sandbox holds")


def test_a_model_without_one_of_its_weights_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights \(model.norm.weight\); copy it again"):
        open_llm(ModelConfig(spec=f"hf:{tmp_path / 'model'}", device="cpu"), "policy")


def test_a_model_with_more_layers_than_its_configuration_counts_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers, "layer_types": (config.get("layer_types") or [])[:layers] or None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"layers that its config.json does not count \(model.layers.{layers}"):
        open_llm(ModelConfig(spec=f"hf:{tmp_path / 'model'}", device="cpu"), "policy")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|new{n}|>" for n in range(200)]})
    tokenizer.chat_template = "<|new199|>" + tokenizer.chat_template
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"in each chat, and the model knows \d+: call model.resize_token_embeddings"):
        open_llm(ModelConfig(spec=f"hf:{tmp_path / 'model'}", device="cpu"), "policy")


def test_a_template_may_refuse_some_chats(tiny_model: Path, tmp_path: Path) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    folder = damaged(tiny_model, tmp_path / "model", "chat_template.jinja", strict)
    assert ChatTemplate.load(folder).text(Prompt((Message("user", "Who?"),))) == "Who?"
