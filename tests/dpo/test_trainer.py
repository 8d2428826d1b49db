"""What the trainer rests on, checked against plain logits and against TRL's own trainer."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.dpo.token_rows import TokenPairs
from reasonrag.dpo.train import LOSS_TYPES, StepDPOTrainer, pair_rows
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.settings import LoraSettings
from tests.training.toys import pair_row, save_calm_model, step_pairs, trajectory_pairs

BETA = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_calm_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def chat(folder):
    return ChatTemplate.load(str(folder))


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def examples(pairs, test=()):
    return TokenPairs(list(pairs), list(test), "c", None, Counter(), {})


def rows_of(pairs):
    return pair_rows(examples(pairs))["train"]


def load(folder, *, moved=0.0):
    """The tiny model; `moved` shifts every weight at random, so that the policy is not the reference."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += moved * torch.randn(parameter.shape, generator=generator)
    return model


def make(rows, folder, tmp_path, *, kind=None, moved=0.0, own_reference=True, more=None, **settings):
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import DPOConfig

    arguments = DPOConfig(
        **{
            "output_dir": str(tmp_path),
            "beta": BETA,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "max_length": None,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "dataloader_pin_memory": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "include_num_input_tokens_seen": "all",
        }
        | settings
    )
    trainer = (kind or StepDPOTrainer)(
        model=load(folder, moved=moved),
        ref_model=load(folder) if own_reference else None,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **(more or {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def loss_of(trainer, rows):
    trainer.model.train()
    return trainer.compute_loss(trainer.model, trainer.data_collator(rows))


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_logp(model, segments):
    """Of exactly the completions' tokens, from the logits of each sequence alone, in the model's own precision."""
    import torch

    total = torch.zeros(())
    for segment in segments:
        ids = torch.tensor([[*segment.prompt_ids, *segment.completion_ids]])
        logps = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
        start = len(segment.prompt_ids)
        for position, token in enumerate(segment.completion_ids, start):
            total = total + logps[position - 1, token]
    return total


def by_hand(policy, reference, pair):
    """Eq. 7 of the DPO paper, written out."""
    import torch

    ratios = [plain_logp(policy, side) - plain_logp(reference, side) for side in (pair.chosen, pair.rejected)]
    return -torch.log(torch.sigmoid(BETA * (ratios[0] - ratios[1])))


@pytest.mark.parametrize("made", [step_pairs, trajectory_pairs])
def test_the_chosen_steps_likelihood_is_added_by_its_weight(made, folder, chat, tmp_path):
    pairs = made(chat, 5)
    more = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    trainer, plain = (make(rows_of(pairs), folder, tmp_path, moved=0.02, **how) for how in (more, {}))
    policy = load(folder, moved=0.02).double()
    tokens = sum(len(segment.completion_ids) for pair in pairs for segment in pair.chosen)
    nll = -sum(plain_logp(policy, pair.chosen).item() for pair in pairs) / tokens
    expected = loss_of(plain, rows_of(pairs)).item() + 0.5 * nll
    assert loss_of(trainer, rows_of(pairs)).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("made", [step_pairs, trajectory_pairs])
def test_the_loss_is_that_of_plain_logits(made, folder, chat, tmp_path):
    pairs = made(chat, 5)
    trainer = make(rows_of(pairs), folder, tmp_path, moved=0.02)
    policy, reference = load(folder, moved=0.02).double(), load(folder).double()
    for pair, row in zip(pairs, rows_of(pairs), strict=True):
        expected = by_hand(policy, reference, pair).item()
        assert abs(expected - 0.6931) > 1e-3
        assert loss_of(trainer, [row]).item() == pytest.approx(expected, abs=1e-5)
    mean = sum(by_hand(policy, reference, pair).item() for pair in pairs) / len(pairs)
    assert loss_of(trainer, rows_of(pairs)).item() == pytest.approx(mean, abs=1e-5)


def test_a_pair_counts_the_other_way_round_by_the_probability_that_its_order_is_wrong(folder, chat, tmp_path):
    pairs = [replace(pair, confidence=sure) for pair, sure in zip(step_pairs(chat, 3), (0.9, 0.3, None), strict=True)]
    rows = pair_rows(examples(pairs), smooth=True)["train"]
    trainer = make(rows, folder, tmp_path, moved=0.02)
    policy, reference = load(folder, moved=0.02).double(), load(folder).double()
    for pair, row, sure in zip(pairs, rows, (0.9, 0.3, 1.0), strict=True):
        reverse = replace(pair, chosen=pair.rejected, rejected=pair.chosen)
        right, wrong = (by_hand(policy, reference, one).item() for one in (pair, reverse))
        assert loss_of(trainer, [row]).item() == pytest.approx(sure * right + (1 - sure) * wrong, abs=1e-5)


@pytest.mark.parametrize("made", [step_pairs, trajectory_pairs])
def test_only_positions_that_predict_tokens_of_a_step_get_a_gradient(made, folder, chat, tmp_path):
    rows = rows_of(made(chat, 5))
    trainer = make(rows, folder, tmp_path, moved=0.02)
    states = []
    hook = trainer.model.model.norm.register_forward_hook(
        lambda module, args, output: states.append(output) or output.retain_grad() if output.requires_grad else None
    )
    loss_of(trainer, rows).backward()
    hook.remove()
    reached = [row for state in states for row in (state.grad.abs().sum(dim=-1) > 0).tolist()]
    scored = trainer.data_collator(rows)["completion_mask"][:, 1:].bool().tolist()

    def places(rows):  # rows may be read in another order, and up to the last scored token only
        return sorted([place for place, there in enumerate(row) if there] for row in rows)

    assert places(reached) == places(scored) and all(map(any, scored))


@pytest.mark.slow
def test_on_the_same_token_ids_it_trains_as_trl_does(folder, tmp_path):
    from trl import DPOTrainer

    keep = ("prompt", "chosen", "rejected")
    rows = [{name: row[name] for name in keep} for row in map(pair_row, range(24))]
    plain = make(rows, folder, tmp_path, kind=DPOTrainer, max_steps=20)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    ids = [{name: row[name] for name in columns} for row in plain.train_dataset]
    assert losses(make(ids, folder, tmp_path, max_steps=20)) == pytest.approx(losses(plain), abs=1e-6)


@pytest.mark.parametrize("made", [step_pairs, trajectory_pairs])
def test_pairs_of_like_length_in_one_pass_train_the_same(made, folder, chat, tmp_path):
    rows = rows_of(made(chat, 20))
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 4}
    shuffled = make([{**row, "length": 0} for row in rows], folder, tmp_path, **settings)
    together = make(rows, folder, tmp_path, **settings)
    assert losses(together) == pytest.approx(losses(shuffled), abs=1e-6)
    padded = [trainer.state.num_input_tokens_seen for trainer in (together, shuffled)]
    assert padded[0] < padded[1]


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "aot", "sft"])
def test_every_loss_of_trl_takes_a_step(loss_type, folder, chat, tmp_path):
    rows = rows_of(step_pairs(chat, 4))
    trainer = make(rows, folder, tmp_path, loss_type=[loss_type], label_smoothing=0.1, max_steps=1)
    before = copy.deepcopy(trainer.model.state_dict())
    (loss,) = losses(trainer)
    assert loss == loss
    assert any((value != before[name]).any() for name, value in trainer.model.state_dict().items())


def test_the_losses_that_are_offered_are_those_of_trl(folder, chat, tmp_path):
    trainer = make(rows_of(step_pairs(chat, 4)), folder, tmp_path, loss_type=["no_such_loss"])
    with pytest.raises(ValueError, match="Unknown loss type") as caught:
        loss_of(trainer, rows_of(step_pairs(chat, 2)))
    assert all(repr(name) in str(caught.value) for name in LOSS_TYPES)
    assert str(caught.value).count("', '") + 1 == len(LOSS_TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("made", [step_pairs, trajectory_pairs])
def test_the_three_references_give_the_same_losses(made, folder, chat, tmp_path):
    from reasonrag.training.model import lora_config

    rows = rows_of(made(chat, 12))

    def three(name, *, own_reference=False, precomputed=False, adapter=True):
        more = {"peft_config": lora_config(LoraSettings(r=4, alpha=8))} if adapter else {}
        trainer = make(
            rows,
            folder,
            tmp_path / name,
            own_reference=own_reference,
            more=more,
            max_steps=3,
            precompute_ref_log_probs=precomputed,
        )
        return losses(trainer)

    off = three("off")
    assert len(set(off)) == 3
    assert three("frozen", own_reference=True) == pytest.approx(off, abs=1e-6)
    assert three("precomputed", precomputed=True) == pytest.approx(off, abs=1e-6)
    full = three("full", own_reference=True, adapter=False)
    assert three("full-precomputed", precomputed=True, adapter=False) == pytest.approx(full, abs=1e-6)


def test_own_losses_refuse_what_only_trl_has(folder, chat, tmp_path):
    rows = rows_of(trajectory_pairs(chat, 4))
    with pytest.raises(ConfigError, match="does not support loss_type"):
        make(rows, folder, tmp_path, loss_type=["ipo"])
    with pytest.raises(ConfigError, match="does not support ld_alpha"):
        make(rows, folder, tmp_path, ld_alpha=0.5)


def test_this_version_of_trl_is_one_that_the_subclass_was_made_for():
    from importlib.metadata import version

    from packaging.version import Version

    assert Version("1.16.0") <= Version(version("trl")) < Version("1.17")
