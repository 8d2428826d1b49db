"""Supervised fine-tuning on chosen steps: what is scored, and that it goes through the same shell."""

from __future__ import annotations

import pytest

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.dpo.train import step_rows
from reasonrag.llm.chat_template import ChatTemplate
from tests.llm.tiny import save_tiny_model
from tests.training.toys import dpo_settings, pair_row, sft_settings, token_pairs, train, write_pairs

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


def quietly(settings, out):
    return train(settings, out, log=lambda line: None)


def test_exactly_the_chosen_step_is_scored_and_each_once(policy, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [pair_row(0), pair_row(0) | {"rejected": pair_row(3)["rejected"]}, pair_row(1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    chat = ChatTemplate.load(str(policy))
    settings = sft_settings(tmp_path / "pairs.parquet", policy)
    made = step_rows(token_pairs(settings, chat))
    assert [len(made["train"]), len(made["test"])] == [2, 0]
    for row, source in zip(made["train"], (pair_row(0), pair_row(1)), strict=True):
        scored = [token for token in row["labels"] if token != -100]
        assert chat.decode(scored) == source["chosen"][0]["content"]
        assert row["input_ids"][-len(scored) :] == scored
        assert len(row["labels"]) == len(row["input_ids"])
        assert source["prompt"][0]["content"] in chat.decode(row["input_ids"][: -len(scored)])


def test_the_first_loss_is_that_of_plain_logits(policy, data, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    settings = sft_settings(data, policy, max_steps=1, per_device_train_batch_size=48)
    summary = quietly(settings, tmp_path / "sft")
    rows = step_rows(token_pairs(settings, ChatTemplate.load(str(policy))))["train"]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    total, tokens = 0.0, 0
    for row in rows:
        logps = torch.log_softmax(model(input_ids=torch.tensor([row["input_ids"]])).logits[0], dim=-1)
        for position, label in enumerate(row["labels"]):
            if label != -100:
                total, tokens = total - logps[position - 1, label].item(), tokens + 1
    (loss,) = [entry["loss"] for entry in summary["history"] if "loss" in entry]
    assert loss == pytest.approx(total / tokens, abs=1e-4)


def test_the_loss_falls_and_the_folder_is_complete(policy, data, tmp_path):
    lines = []
    summary = train(
        sft_settings(data, policy, max_steps=12, trainer={"logging_steps": 1}), tmp_path / "sft", log=lines.append
    )
    losses = [entry["loss"] for entry in summary["history"] if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert summary["stage"] == "sft"
    assert summary["data"]["rows"] == {"train": 48, "held_out": 8}
    assert any("mean_token_accuracy" in line for line in lines)
    names = {path.name for path in (tmp_path / "sft").iterdir()}
    assert names >= {"model.safetensors", "training.json", "curves.svg", "curves.png", "config.yaml"}


def test_a_folder_with_dpo_is_refused(policy, data, tmp_path):
    train(dpo_settings(data, policy, max_steps=1), tmp_path / "out", log=lambda line: None)
    with pytest.raises(RunError, match="stage: 'dpo' there, 'sft' now"):
        quietly(sft_settings(data, policy, max_steps=1), tmp_path / "out")


def test_packing_is_refused(policy, data, tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.packing cannot be set"):
        quietly(sft_settings(data, policy, trainer={"packing": True}), tmp_path / "sft")
