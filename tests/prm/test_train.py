"""A process reward model trained on real trees of the demo world: what it leaves behind, and how it is loaded."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, DataError, LLMError, RunError
from reasonrag.core.settings import gather, validate
from reasonrag.core.types import Completion, FinishReason
from reasonrag.pipeline.build import build_trees
from reasonrag.prm.scorer import open_scorer
from reasonrag.prm.train import read_labels, train_prm
from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.tables import tree_schema
from reasonrag.training.settings import PRM_PRESETS, PRMSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    out = tmp_path_factory.mktemp("trees") / "run"
    build_trees(load_config(preset="demo", overrides={"questions.limit": 6, "search.iterations": 3}), out)
    return out


def settings(trees, **more):
    few = {"data": str(trees), "test_share": 0.4, "max_steps": 4, "save_steps": 2, "trainer.eval_steps": 4}
    return validate(PRMSettings, gather(PRM_PRESETS, preset="demo", overrides=few | more))


@pytest.fixture(scope="module")
def trained(trees, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "prm"
    return out, train_prm(settings(trees), out, log=lambda line: None).summary


def held_out(trees):
    """Steps as the policy takes them: prompt and completion."""
    rows = read_labels(str(trees), settings(trees)).test
    ends = {"turn": FinishReason.STOP, "stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    steps = [row.sides.chosen[0] for row in rows]
    return [(step.prompt, Completion(step.text, ends[step.end], step.token_ids)) for step in steps]


def values(folder, steps):
    async def ask():
        scorer = open_scorer(str(folder))
        # Several tasks at once: each gets its own.
        parts = await asyncio.gather(scorer.score(steps[:3]), scorer.score(steps[3:]))
        await scorer.aclose()
        return [*parts[0], *parts[1]]

    return asyncio.run(ask())


def test_the_folder_is_a_language_model_that_others_load_as_such(trained, trees):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, summary = trained
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    described = json.loads((out / "prm.json").read_text())
    good, bad = tokenizer.convert_tokens_to_ids(described["tokens"])
    assert [good, bad] == described["token_ids"]
    steps = held_out(trees)
    by_hand = []
    for prompt, completion in steps:
        chat = [{"role": message.role, "content": message.content} for message in prompt.messages]
        read = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(read, add_special_tokens=False)["input_ids"] + list(completion.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        by_hand.append(float(torch.softmax(logits[[good, bad]], 0)[0]))
    assert values(out, steps) == pytest.approx(by_hand, abs=1e-5)
    assert summary["measures"]["steps"] == len(steps) and summary["data"]["held_out"]["steps"] == len(steps)
    assert summary["measures"]["brier"]["mean"] < 0.3


def test_it_resumes_and_refuses_another_run(trained, trees, tmp_path):
    out, summary = trained
    lines = []
    assert train_prm(settings(trees), out, log=lines.append).summary == summary and "already finished" in lines[-1]
    with pytest.raises(RunError, match="alpha"):
        train_prm(settings(trees, alpha=1.0), out, log=lines.append)
    (out / "training.json").rename(tmp_path / "training.json")  # as if it had been killed at the end
    again = train_prm(settings(trees), out, log=lines.append).summary
    assert any("resuming from checkpoint-4" in line for line in lines)
    assert again["measures"] == summary["measures"]


def test_adapters_are_trained_and_merged(trees, tmp_path):
    out = tmp_path / "lora"
    train_prm(settings(trees, method="lora", merge=True, max_steps=2), out, log=lambda line: None)
    steps = held_out(trees)[:4]
    assert values(out, steps) == pytest.approx(values(out / "merged", steps), abs=1e-4)


def test_a_model_that_says_nan_is_an_error_and_never_a_score(trained, trees, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(trained[0], tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    weights[name] = weights[name] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LLMError) as failed:
        values(folder, held_out(trees)[:4])
    assert failed.value.cause == "not_finite"


def test_tokens_that_the_vocabulary_lacks_are_refused(trees, tmp_path):
    with pytest.raises(ConfigError, match="two tokens"):
        train_prm(settings(trees, tokens=["+", "-"]), tmp_path / "prm", log=lambda line: None)


def test_a_tree_with_a_circle_has_no_labels_and_ends(trees, tmp_path):
    (file,) = (shutil.copytree(trees, tmp_path / "run") / "trees").glob("*.parquet")
    rows = read_parquet(file, tree_schema())
    rows[1]["parent_id"] = 2
    write_parquet(file, rows, tree_schema())
    with pytest.raises(DataError, match="node 1: no tree of build-tree has it there"):
        read_labels(str(tmp_path / "run"), settings(tmp_path / "run"))
