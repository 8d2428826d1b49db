"""Training on preference pairs, through TRL: DPO, and supervised fine-tuning on the chosen steps.

`train_dpo` reads from top to bottom: preferences -> pairs
of token rows -> trainer -> train -> evaluate -> save.

Imports TRL, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import expect, nearest
from reasonrag.dpo.demonstrations import read_demonstrations
from reasonrag.dpo.preferences import read_preferences
from reasonrag.dpo.token_rows import TokenPairs, data_of, tokenise
from reasonrag.storage.files import short_hash
from reasonrag.training.model import load_weights, open_source
from reasonrag.training.run import Log, TokenRows, TrainingData, TrainingRun
from reasonrag.training.settings import DPOSettings, SFTSettings
from reasonrag.training.trainer import GuardedTrainer

LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
# They depend on which pairs share a forward pass.
_BATCH_LOSS_TYPES = {"aot", "aot_unpaired"}
_IGNORED_LABEL = -100
_STEP_COLUMN = "prompt_ids"
_CONFIDENCE = "confidence"
_SEGMENT_COLUMNS = ("chosen_prompts", "chosen_completions", "rejected_prompts", "rejected_completions")
_REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def train_dpo(settings: DPOSettings, out: Path | None, *, log: Log = print) -> TrainingRun[DPOSettings]:
    """Train a policy on preferences between steps (arXiv:2505.14069, sec. 2.2.3 and eq. 3), or resume in `out`.

    The loss is -log sigmoid(beta * (log-ratio of the chosen step - log-ratio
    of the rejected step)), over the tokens of the steps alone; a log-ratio
    is log p(step | prompt) of the policy less that of the reference model.
    """
    expect(DPOSettings, settings)
    loss_types = settings.loss_type.split(",")
    for loss_type in loss_types:
        if loss_type not in LOSS_TYPES:  # TRL would notice at the first step
            raise ConfigError(f"loss_type {loss_type!r} is unknown{nearest(loss_type, LOSS_TYPES)}")
    # Model, folder and TRL's arguments. A mistake in them is an error before anything is read.
    own = {"loss_type": loss_types, "precompute_ref_log_probs": settings.reference == "precomputed"}
    run = TrainingRun("dpo", settings, out, DPOConfig, log=log, **own)

    of_reference = settings.model_copy(update={"model": settings.reference_model})

    def read() -> TrainingData:
        # A run's folder, a file or a Hub data set ->
        # checked rows -> the ids read and sampled by the policy.
        preferences = read_preferences(data_of(settings))
        pairs = tokenise(preferences, settings, run.chat, context=run.source.context(), log=run.log)
        smooth, checksum = settings.smooth_by_confidence, pairs.checksum
        if smooth:
            checksum = short_hash([checksum, *(pair.confidence for pair in (*pairs.train, *pairs.test))])
        if settings.reference_model is not None:  # the identity has its name alone
            checksum = short_hash([checksum, open_source(of_reference).checksum])
        # With lengths, pairs of like length share a forward
        # pass, unless the loss compares those of a pass.
        with_lengths = _BATCH_LOSS_TYPES.isdisjoint(loss_types)
        make_rows = partial(pair_rows, pairs, with_lengths=with_lengths, smooth=smooth)
        return TrainingData(checksum, pairs.card, pairs.facts, make_rows)

    with run:
        # Token rows on disk, and the last complete checkpoint if this run was interrupted.
        if (rows := run.open(read)) is None:  # the folder holds the finished run
            return run

        # With adapters the reference is the model below them; otherwise
        # it is a frozen copy. It is loaded here, as TRL would load the
        # model's newest revision, whatever revision the settings name.
        is_frozen = settings.reference == "frozen" or (settings.reference == "auto" and settings.method == "full")
        reference = load_weights(run.source, settings) if is_frozen else None
        if settings.reference_model is not None:
            source = open_source(of_reference)
            reference = load_weights(source, settings)
            if source.is_adapter:
                reference = reference.merge_and_unload()

        trainer = run.build_trainer(StepDPOTrainer, *rows, ref_model=reference)
        run.train(trainer)
        run.evaluate(trainer)  # loss, margin and accuracy on held-out questions
        run.save(trainer)  # policy, card, curves; training.json last, which makes the run count as finished
    return run


def train_sft(settings: SFTSettings, out: Path | None, *, log: Log = print) -> TrainingRun[SFTSettings]:
    """Fine-tune on steps, each once: all of the best trajectories, or the chosen steps of pairs.

    The second is DPO's rival in arXiv:2505.14069, Table 3.
    """
    expect(SFTSettings, settings)
    run = TrainingRun("sft", settings, out, SFTConfig, log=log)

    def read() -> TrainingData:
        data = data_of(settings)
        preferences = read_preferences(data) if settings.examples == "chosen" else read_demonstrations(data, settings)
        if (facts := preferences.trajectories) is not None:
            run.log(
                "demonstrations: {trajectories} trajectories, of {questions} of {of_questions} questions, "
                "outcome {mean_outcome:.2f}, {mean_steps:.1f} steps on average".format(**facts)
            )
        pairs = tokenise(preferences, settings, run.chat, context=run.source.context(), log=run.log)
        return TrainingData(pairs.checksum, pairs.card, pairs.facts, partial(step_rows, pairs))

    with run:
        if rows := run.open(read):
            trainer = run.build_trainer(StepSFTTrainer, *rows)
            run.train(trainer)
            run.evaluate(trainer)
            run.save(trainer)
    return run


def pair_rows(pairs: TokenPairs, *, with_lengths: bool = True, smooth: bool = False) -> dict[str, TokenRows]:
    """Return token rows by split, if `smooth` with the `confidence` of each pair, 1 where it is unknown.

    A pair of single steps after one prompt has TRL's `prompt_ids`, `chosen_ids`
    and `rejected_ids`. If any pair is of another shape, or `smooth`, all have
    `chosen_prompts`, `chosen_completions`, `rejected_prompts` and
    `rejected_completions`, each a list with an entry for every step. `length`
    lets the trainer put pairs of like length into one forward pass.
    """
    as_steps = not smooth
    for pair in (*pairs.train, *pairs.test):
        prompts = [[segment.prompt_ids for segment in side] for side in (pair.chosen, pair.rejected)]
        as_steps &= len(prompts[0]) == 1 and prompts[0] == prompts[1]
    rows_by_split: dict[str, TokenRows] = {"train": [], "test": []}
    for split, members in (("train", pairs.train), ("test", pairs.test)):
        for pair in members:
            row: dict[str, Any] = {_STEP_COLUMN: list(pair.chosen[0].prompt_ids)} if as_steps else {}
            for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                if as_steps:
                    row[f"{side}_ids"] = list(segments[0].completion_ids)
                else:
                    row[f"{side}_prompts"] = [list(segment.prompt_ids) for segment in segments]
                    row[f"{side}_completions"] = [list(segment.completion_ids) for segment in segments]
            if smooth:
                row[_CONFIDENCE] = 1.0 if pair.confidence is None else pair.confidence
            if with_lengths:
                row["length"] = pair.tokens
            rows_by_split[split].append(row)
    return rows_by_split


def step_rows(pairs: TokenPairs) -> dict[str, TokenRows]:
    """Return `input_ids`, `labels` and `length` by split: every chosen step once, with its tokens alone scored."""
    rows_by_split: dict[str, TokenRows] = {"train": [], "test": []}
    for split, members in (("train", pairs.train), ("test", pairs.test)):
        # A step is the chosen one of several pairs; it is learned once.
        for segment in dict.fromkeys(segment for pair in members for segment in pair.chosen):
            labels = [_IGNORED_LABEL] * len(segment.prompt_ids) + list(segment.completion_ids)
            ids = [*segment.prompt_ids, *segment.completion_ids]
            rows_by_split[split].append({"input_ids": ids, "labels": labels, "length": len(ids)})
    return rows_by_split


class StepDPOTrainer(GuardedTrainer, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer on rows of token ids, as `pair_rows` returns them; rows of text are prepared by TRL.

    On pairs of single steps the loss is TRL's own, of any type. On pairs of
    trajectories it is the sigmoid loss (arXiv:2305.18290, eq. 7), alone or with
    "sft", and the log-probability of a side is the sum over its steps, each in its
    own prompt. With a column `confidence`, c, the sigmoid loss of a pair is c times
    its own and 1 - c times that of its reverse (cDPO; arXiv:2405.00451 has visits).

    Raises:
        ConfigError: pairs of trajectories, and a TRL option that their loss does not support.
    """

    def __init__(self, *, args: Any, processing_class: Any, train_dataset: Any, **more: Any) -> None:
        if _SEGMENT_COLUMNS[0] in (train_dataset.column_names or ()):
            supported = {"f_divergence_type": "reverse_kl", "ld_alpha": None, "use_weighting": False}
            others = [name for name, value in supported.items() if getattr(args, name) != value]
            if list(args.loss_type) not in (["sigmoid"], ["sigmoid", "sft"]):
                others.append("loss_type")
            if others:
                raise ConfigError(
                    "pairs of trajectories, and smoothing by confidence, have the loss sigmoid or sigmoid,sft, which "
                    f"does not support {', '.join(others)}; leave that out, or train on pairs of steps unsmoothed"
                )
            if processing_class.pad_token is None:
                processing_class.pad_token = processing_class.eos_token
            args.remove_unused_columns = False  # which the collator takes
            more["data_collator"] = partial(collate_segments, pad_token_id=processing_class.pad_token_id)
        super().__init__(args=args, processing_class=processing_class, train_dataset=train_dataset, **more)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if {_STEP_COLUMN, _SEGMENT_COLUMNS[0]} & set(dataset.column_names or ()):
            return dataset
        return super()._prepare_dataset(dataset, *args, **kwargs)

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """Return `[pairs]` log-probabilities of both sides under the reference; TRL's precomputing calls it too."""
        if "row_index" not in inputs:
            return super().compute_ref_log_probs(model, inputs)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")}
        return _sum_by_pair(torch.cat(super().compute_ref_log_probs(model, batch)), inputs)

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss of pairs of single steps, and ours of all others."""
        if "row_index" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        outputs = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            labels=inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, _IGNORED_LABEL),
            use_cache=False,
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        # `log_probs` is `[R, T - 1]`, 0 where nothing is scored; its sum is
        # log p(step | prompt) of each step. `[pairs]` log-probabilities of the
        # chosen and the rejected sides, under the policy and the reference.
        chosen, rejected = _sum_by_pair(outputs.log_probs.sum(dim=1), inputs)
        if self.precompute_ref_logps:
            ref_chosen, ref_rejected = (inputs[name] for name in _REFERENCE_COLUMNS)
        else:
            ref_chosen, ref_rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        chosen_rewards = self.beta * (chosen - ref_chosen)
        rejected_rewards = self.beta * (rejected - ref_rejected)
        metrics = {  # under TRL's names
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "rewards/accuracies": chosen_rewards > rejected_rewards,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        # One table, so that all metrics take one round of communication between the processes.
        table = torch.stack([value.detach().float() for value in metrics.values()], dim=1)
        means = self.accelerator.gather(table).mean(dim=0).tolist()
        for name, mean in zip(metrics, means, strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(mean)
        margins, confidence = metrics["rewards/margins"], inputs.get(_CONFIDENCE, 1.0)
        losses = [-(confidence * logsigmoid(margins) + (1 - confidence) * logsigmoid(-margins)).mean()]
        if "sft" in self.loss_types:  # a token of the chosen sides on average, as in TRL
            is_chosen = inputs["row_index"] < len(margins)
            losses.append(-outputs.log_probs[is_chosen].sum() / inputs["completion_mask"][is_chosen].sum())
        loss = sum(weight * part for weight, part in zip(self.loss_weights, losses, strict=True))
        return loss + self.router_aux_loss_coef * outputs.aux_loss if self.aux_loss_enabled else loss


class StepSFTTrainer(GuardedTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with the checks of `GuardedTrainer`; its rows have `input_ids` and `labels`."""


def collate_segments(examples: Sequence[Mapping[str, Any]], *, pad_token_id: int) -> dict[str, Any]:
    """Collate pairs of trajectories: every step is a sequence `[R, T]`, padded on the right, chosen sides first.

    `row_index` `[R]` names the sum that a sequence
    belongs to: the number of its pair on the chosen side,
    and that plus the number of pairs on the rejected one.
    """
    # First, because the evaluation loop weighs a batch by the length of its first tensor.
    batch: dict[str, Any] = {"pair_number": torch.arange(len(examples))}
    sequences, scored, owners = [], [], []
    for offset, side in ((0, "chosen"), (len(examples), "rejected")):
        for number, example in enumerate(examples):
            steps = zip(example[f"{side}_prompts"], example[f"{side}_completions"], strict=True)
            for prompt, completion in steps:
                sequences.append(torch.tensor([*prompt, *completion]))
                scored.append(torch.tensor([0] * len(prompt) + [1] * len(completion)))
                owners.append(offset + number)
    batch["row_index"] = torch.tensor(owners)
    batch["input_ids"] = pad_sequence(sequences, batch_first=True, padding_value=pad_token_id)
    batch["attention_mask"] = pad_sequence(list(map(torch.ones_like, sequences)), batch_first=True)
    batch["completion_mask"] = pad_sequence(scored, batch_first=True)
    for name in (*_REFERENCE_COLUMNS, _CONFIDENCE):
        if name in examples[0]:
            batch[name] = torch.tensor([example[name] for example in examples])
    return batch


def _sum_by_pair(values: Any, inputs: Mapping[str, Any]) -> Any:
    """Sum the `[R]` values of sequences to `[pairs]` of the chosen and `[pairs]` of the rejected sides."""
    sums = values.new_zeros(2 * len(inputs["pair_number"]))
    return sums.index_add(0, inputs["row_index"], values).chunk(2)
