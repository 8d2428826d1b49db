"""The head on scored positions alone, against TRL's own head on all of them."""

from __future__ import annotations

from typing import Any

import pytest

SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What heads differ in: tied and untied weights, softcapping, a scale, a bias, and the loss of a mixture's router.
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "untied": {"model_type": "llama", "tie_word_embeddings": False},
    "softcapping": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4},
    "scale": {"model_type": "cohere", "logit_scale": 0.25},
    "bias": {"model_type": "phi"},
    "mixture": {"model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True},
}

SHARED = 130  # tokens with which two rows begin, enough to be read once


def toy(name: str, *, adapter: bool = False, checkpointing: bool = False) -> Any:
    """A model with TRL's head; peft goes around that, as in TRL's trainers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SMALL | MODELS[name])))
    if checkpointing:
        model.gradient_checkpointing_enable()
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    base = model.get_base_model() if adapter else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model.train()


def scores(model: Any, scored: slice, *, shared: int = 0, unlike: int = 0) -> tuple[Any, dict[str, Any]]:
    """Outputs for two padded rows that begin with the same `shared` tokens, but for the `unlike`
    first, then have 12 of which `scored` is scored; and the gradients of a loss of all that have any.
    """
    import torch

    ids = torch.randint(3, 48, (2, shared + 12), generator=torch.Generator().manual_seed(1))
    ids[1, unlike:shared] = ids[0, unlike:shared]
    mask = torch.ones_like(ids)
    mask[1, shared + 9 :] = 0
    labels = torch.full_like(ids, -100)
    scored = slice(shared + scored.start, shared + scored.stop)
    labels[:, scored] = ids[:, scored]
    labels[mask == 0] = -100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    loss = (outputs.log_probs * torch.linspace(1, 2, shared + 11)).sum() + 0.1 * outputs.entropy.sum()
    (loss + (outputs.aux_loss or 0.0)).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.parametrize(
    "case",
    [
        *({"name": name} for name in MODELS),
        {"name": "tied", "adapter": True},
        {"name": "tied", "adapter": True, "checkpointing": True},
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_all_positions(case, shared):
    import torch

    from reasonrag.training.trainer import score_labels_only

    # In double precision no rounding hides a wrong term; a mixture's experts do not compute in it.
    precision = torch.float32 if case["name"] == "mixture" else torch.float64
    whole, cut = toy(**case).to(precision), toy(**case).to(precision)
    score_labels_only(cut)
    start = 1 if shared else 7  # the row's first own token, or a later one
    whole_outputs, whole_gradients = scores(whole, slice(start, 11), shared=shared)
    cut_outputs, cut_gradients = scores(cut, slice(start, 11), shared=shared)
    assert whole_outputs.keys() == cut_outputs.keys()
    for name in whole_outputs:
        torch.testing.assert_close(cut_outputs[name], whole_outputs[name], rtol=1e-5, atol=1e-6)
    assert whole_gradients.keys() == cut_gradients.keys()
    for name in whole_gradients:
        torch.testing.assert_close(cut_gradients[name], whole_gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapter", [False, True])
def test_only_what_scored_positions_depend_on_costs_anything(adapter):
    from torch.utils.flop_counter import FlopCounterMode

    from reasonrag.training.trainer import score_labels_only

    model = toy("untied", adapter=adapter)
    score_labels_only(model)

    def flops(scored: slice, **rows: int) -> int:
        model.zero_grad()
        with FlopCounterMode(display=False) as counter:
            _, gradients = scores(model, scored, **rows)
        assert gradients  # nothing to score is a loss of 0, and no failure
        return counter.get_total_flops()

    assert flops(slice(1, 1)) > 0
    one, two, three = (flops(slice(start, 9)) for start in (8, 7, 6))  # in each of two rows
    # Logits, and again for the backward pass; products in place are not counted.
    each = 2 * 2 * 48 * 16
    assert two - one == three - two == 2 * each
    # Two rows that begin alike cost little more than one, and rows of unlike length are not padded.
    assert flops(slice(1, 9), shared=SHARED) < 0.6 * flops(slice(1, 9), shared=SHARED, unlike=1)


def test_a_step_has_the_rows_that_it_had_and_less_padding(tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer

    from reasonrag.dpo.train import StepSFTTrainer
    from reasonrag.training.model import model_path

    def batches(rows: list[dict[str, Any]], *, epoch: int = 0, skip: int = 0) -> list[Any]:
        from accelerate import skip_first_batches
        from transformers import set_seed
        from trl import SFTConfig

        set_seed(0)
        arguments = SFTConfig(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, use_cpu=True, bf16=False,
            max_length=None, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = StepSFTTrainer(
            model=toy("tied"), args=arguments, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model_path("demo")),
        )  # fmt: skip
        loader = skip_first_batches(trainer.get_train_dataloader(), skip)
        loader.set_epoch(epoch)
        return [batch["input_ids"] for batch in loader]

    def rows_of(batches: list[Any]) -> list[set[int]]:
        """The first tokens of the rows of each step; they are numbers of rows."""
        return [{int(row[0]) for batch in batches[i : i + 3] for row in batch} for i in range(0, len(batches), 3)]

    rows = [
        {"input_ids": [number + 3] * (1 + number * 7 % 30), "labels": [3] * (1 + number * 7 % 30)}
        for number in range(20)
    ]
    plain = batches(rows)
    sorted_rows = [{**row, "length": len(row["input_ids"])} for row in rows]
    grouped = batches(sorted_rows)
    assert rows_of(grouped) == rows_of(plain)
    assert sum(batch.numel() for batch in grouped) < 0.9 * sum(batch.numel() for batch in plain)
    assert [batch.tolist() for batch in grouped[-1:]] == [batch.tolist() for batch in plain[-1:]]  # an incomplete step
    later = batches(sorted_rows, epoch=1)
    assert rows_of(later) == rows_of(batches(rows, epoch=1)) != rows_of(grouped)
    resumed = batches(sorted_rows, epoch=1, skip=3)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in later[3:]]
