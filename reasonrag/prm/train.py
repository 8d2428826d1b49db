"""A process reward model from trees: `prm train`. Imports transformers, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import TrainingArguments

from reasonrag.dpo.train import TokenPairs, data_of, tokenise
from reasonrag.prm.labels import read_labels
from reasonrag.prm.measures import measures
from reasonrag.prm.scorer import PRM_FILE, answer_ids, log_odds, padded
from reasonrag.training.run import Log, TokenRows, TrainingData, TrainingRun
from reasonrag.training.settings import PRMSettings
from reasonrag.training.trainer import GuardedTrainer

_PRINTED = ("auc", "sibling_auc", "brier", "ece")


def train_prm(settings: PRMSettings, out: Path | None, *, log: Log = print) -> TrainingRun[PRMSettings]:
    """Train a causal language model to predict the SPRE of each step of some trees.

    `training.json` has under `measures` how good it is on the held-out questions.
    """
    run = TrainingRun("prm", settings, out, log=log)
    run.prepare(TrainingArguments, remove_unused_columns=False)
    token_ids = answer_ids(run.chat, settings.tokens)
    run.model_files[PRM_FILE] = {"tokens": settings.tokens, "token_ids": token_ids, "at": "last token of a step"}

    def read() -> TrainingData:
        labels = read_labels(data_of(settings), settings)
        steps = tokenise(labels, settings, run.chat, context=run.source.context(), log=run.log)
        return TrainingData(steps.checksum, steps.card, steps.facts, partial(label_rows, steps))

    with run:
        rows = run.open(read)
        if rows is None:
            return run
        trainer = run.build_trainer(PRMTrainer, *rows, token_ids=token_ids)
        run.train(trainer)
        held_out_measures = None
        if trainer.eval_dataset is not None:
            predicted = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")  # each process computes a part
            trainer.log(predicted.metrics)
            held_out_measures = _measure(trainer, predicted.predictions)
            known = {name: held_out_measures[name] or {"mean": float("nan")} for name in _PRINTED}
            run.log(
                "held-out steps: AUC {auc[mean]:.3f}, among siblings {sibling_auc[mean]:.3f}, Brier {brier[mean]:.4f}, "
                "ECE {ece[mean]:.3f}".format(**known)
            )
        run.save(trainer, measures=held_out_measures)
    return run


def label_rows(steps: TokenPairs) -> dict[str, TokenRows]:
    """Return `input_ids`, `labels` (SPRE), `weights` with mean 1, `state` and `question` by split."""
    mean = sum(step.target.weight for step in steps.train if step.target) / len(steps.train)
    numbers: dict[tuple[str, str], int] = {}
    rows_by_split: dict[str, TokenRows] = {"train": [], "test": []}
    for split, members in (("train", steps.train), ("test", steps.test)):
        for step in members:
            (segment,), target = step.chosen, step.target
            assert target is not None
            row = {"input_ids": [*segment.prompt_ids, *segment.completion_ids], "length": segment.tokens}
            row |= {"labels": target.value, "weights": target.weight / mean, "state": target.state}
            rows_by_split[split].append(row | {"question": numbers.setdefault(step.group, len(numbers))})
    return rows_by_split


def _measure(trainer: Any, log_odds: Any) -> dict[str, Any]:
    rows, labels = trainer.eval_dataset, trainer.train_dataset["labels"]
    predicted = torch.sigmoid(torch.tensor(log_odds)).tolist()
    question, state, spre = (list(rows[name]) for name in ("question", "state", "labels"))
    return measures(question, state, predicted, spre, usual=sum(labels) / len(labels))


class PRMTrainer(GuardedTrainer):
    """Binary cross-entropy with soft `labels` in [0, 1] at the last token of `input_ids`; `weights` have mean 1."""

    def __init__(self, *, model: Any, peft_config: Any, token_ids: tuple[int, int], **more: Any) -> None:
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
            model.enable_input_require_grads()  # or gradient checkpointing would find nothing to train
        super().__init__(model=model, data_collator=_collate, **more)
        self.token_ids = token_ids
        self.model_accepts_loss_kwargs = False  # the loss is a mean over rows, whatever the number of tokens

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, **more: Any) -> Any:
        odds = log_odds(model, inputs["input_ids"], inputs["attention_mask"], self.token_ids)
        loss = binary_cross_entropy_with_logits(odds, inputs["labels"], weight=inputs["weights"])
        return (loss, {"logits": odds}) if return_outputs else loss


def _collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    input_ids, attention_mask = padded([row["input_ids"] for row in rows])
    values = {name: torch.tensor([float(row[name]) for row in rows]) for name in ("labels", "weights")}
    return {"input_ids": input_ids, "attention_mask": attention_mask, **values}
