"""TRL's DPOTrainer for steps: token-in rows, pairs of whole trajectories, pair weights, reward margins, an SFT term.

A row of a step pair has `prompt_ids`, `chosen_ids`, `rejected_ids`. A row of a trajectory pair has `chosen_prompts`,
`chosen_completions`, `rejected_prompts`, `rejected_completions`, each a list of segments: every step is scored in its
own prompt, and the log-probability of a side is the sum. Either may have a `pair_weight` and a `pair_margin`.

Imports TRL, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from trl import DPOTrainer, SFTTrainer

from reasonrag.core.errors import ConfigError
from reasonrag.training.trainer import GuardedTrainer

STEP_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
SEGMENT_COLUMNS = ("chosen_prompts", "chosen_completions", "rejected_prompts", "rejected_completions")
_OUR_COLUMNS = ("pair_weight", "pair_margin", "row_index")
_REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")

TokenRow = Mapping[str, Any]


class StepCollator:
    """Collate rows to a batch: sequences padded on the right, those of the chosen sides first.

    `input_ids`, `attention_mask` and `completion_mask` are `[R, T]`, with R = 2 x pairs for step pairs, as in TRL. With
    several segments a side, `row_index` `[R]` names the sum of each sequence: the pair's number on the chosen
    side, that plus the number of pairs on the rejected one. `pair_weight`, `pair_margin` and the log-probabilities of
    the reference are `[pairs]`, and present if the rows have them.
    """

    def __init__(self, pad_token_id: int, *, pad_to_multiple_of: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, examples: Sequence[TokenRow]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        sequences: list[tuple[list[int], list[int]]] = []  # prompt and completion ids
        if SEGMENT_COLUMNS[0] in examples[0]:
            # First, because the evaluation loop weighs a batch by the length of its first tensor.
            batch["pair_weight"] = torch.tensor([float(e.get("pair_weight", 1.0)) for e in examples])
            owners: list[int] = []
            for offset, side in ((0, "chosen"), (len(examples), "rejected")):
                for number, example in enumerate(examples):
                    prompts, completions = example[f"{side}_prompts"], example[f"{side}_completions"]
                    sequences += zip(prompts, completions, strict=True)
                    owners += [offset + number] * len(prompts)
            batch["row_index"] = torch.tensor(owners)
        else:
            for side in ("chosen_ids", "rejected_ids"):
                sequences += [(example["prompt_ids"], example[side]) for example in examples]
        length = max(len(prompt) + len(completion) for prompt, completion in sequences)
        length += -length % (self.pad_to_multiple_of or 1)
        input_ids = torch.full((len(sequences), length), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        completion_mask = torch.zeros_like(input_ids)
        for index, (prompt, completion) in enumerate(sequences):
            start, end = len(prompt), len(prompt) + len(completion)
            input_ids[index, :end] = torch.tensor(prompt + completion)
            attention_mask[index, :end] = 1
            completion_mask[index, start:end] = 1
        batch |= {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": completion_mask}
        for name in ("pair_weight", "pair_margin", *_REFERENCE_COLUMNS):
            if name in examples[0]:
                batch[name] = torch.tensor([float(example[name]) for example in examples])
        return batch


class StepDPOTrainer(GuardedTrainer, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer on rows of token ids; rows of text are prepared by TRL.

    Without weights, margins, an SFT term or trajectories the loss is TRL's own, of any type. Otherwise it is, for pairs
    with weight w, margin m and a chosen step of n tokens,
    `mean(w * (-log sigmoid(beta * (log-ratio of chosen - of rejected) - m) - sft_weight * logp(chosen) / n))`:
    arXiv:2305.18290 eq. 7, the margin of arXiv:2307.09288 eq. 2, the SFT term of arXiv:2404.19733 eq. 1.

    Args:
        sft_weight: weight of the mean negative log-likelihood per token of the chosen side.

    Raises:
        ConfigError: a TRL option that this loss does not support.
    """

    def __init__(self, *, args: Any, processing_class: Any, train_dataset: Any, sft_weight: float = 0.0, **more: Any):
        self.sft_weight = sft_weight
        columns = set(train_dataset.column_names or ())
        if sft_weight or columns & {*_OUR_COLUMNS, SEGMENT_COLUMNS[0]}:
            is_set = {
                "loss_type": args.loss_type != ["sigmoid"],
                "loss_weights": args.loss_weights is not None,
                "ld_alpha": args.ld_alpha is not None,
                "use_weighting": args.use_weighting,
                "f_divergence_type": args.f_divergence_type != "reverse_kl",
            }
            if unsupported := [name for name, value in is_set.items() if value]:
                raise ConfigError(
                    "pair weights, reward margins, an SFT term and pairs of trajectories have the plain sigmoid loss, "
                    f"which does not support {', '.join(unsupported)}; leave that out, or train on step pairs without "
                    "those"
                )
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
        if columns & {STEP_COLUMNS[0], SEGMENT_COLUMNS[0]}:
            pad = args.pad_to_multiple_of
            more.setdefault("data_collator", StepCollator(processing_class.pad_token_id, pad_to_multiple_of=pad))
            if args.max_length is not None:
                raise ConfigError("rows of token ids are never cut; set max_length of the trainer to None")
        super().__init__(args=args, processing_class=processing_class, train_dataset=train_dataset, **more)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if {STEP_COLUMNS[0], SEGMENT_COLUMNS[0]} & set(dataset.column_names or ()):
            return dataset
        return super()._prepare_dataset(dataset, *args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns: list[str] = list(
            {*self._signature_columns, *SEGMENT_COLUMNS, "pair_weight", "pair_margin"}
        )

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return `[pairs]` log-probabilities of both sides under the reference; TRL's precomputing calls it too."""
        batch = {name: value for name, value in inputs.items() if name not in _OUR_COLUMNS}
        return _by_pair(torch.cat(super().compute_ref_log_probs(model, batch)), inputs)

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any], return_outputs: bool) -> Any:
        if not self.sft_weight and not any(name in inputs for name in _OUR_COLUMNS):
            return super()._compute_loss(model, inputs, return_outputs)
        if return_outputs:
            raise ConfigError("compute_metrics needs logits, which this loss does not build; leave it out")
        outputs = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            labels=inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100),
            use_cache=False,
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        # `[pairs]` log-probabilities of the chosen and the rejected sides, under the policy and the reference.
        chosen, rejected = _by_pair(outputs.log_probs.sum(dim=1), inputs)
        if self.precompute_ref_logps:
            ref_chosen, ref_rejected = (inputs[name] for name in _REFERENCE_COLUMNS)
        else:
            ref_chosen, ref_rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        chosen_rewards = self.beta * (chosen - ref_chosen)
        rejected_rewards = self.beta * (rejected - ref_rejected)
        margins = chosen_rewards - rejected_rewards
        metrics = {  # under TRL's names
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": margins,
            "rewards/accuracies": chosen_rewards > rejected_rewards,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        losses = -logsigmoid(margins - inputs["pair_margin"] if "pair_margin" in inputs else margins)
        if self.sft_weight:
            tokens, _ = _by_pair(inputs["completion_mask"].sum(dim=1).to(chosen), inputs)
            metrics["nll/chosen"] = -chosen / tokens.clamp(min=1)
            losses = losses + self.sft_weight * metrics["nll/chosen"]
        if "pair_weight" in inputs:
            losses = losses * inputs["pair_weight"]
        # One table, so that all metrics take one round of communication between the processes.
        table = torch.stack([value.detach().float() for value in metrics.values()], dim=1)
        means = self.accelerator.gather(table).mean(dim=0).tolist()
        for name, mean in zip(metrics, means, strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(mean)
        loss = losses.mean()
        return loss + self.router_aux_loss_coef * outputs.aux_loss if self.aux_loss_enabled else loss


def _by_pair(rows: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Sum the `[R]` values of sequences to `[pairs]` of the chosen and `[pairs]` of the rejected sides."""
    if "row_index" in inputs:
        sums = rows.new_zeros(2 * len(inputs["pair_weight"]))
        rows = sums.index_add(0, inputs["row_index"], rows)
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


class StepSFTTrainer(GuardedTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with the checks of `GuardedTrainer`; its rows have `input_ids` and `labels`."""
