"""A process reward model from trees: `prm train`. Imports transformers, so it is itself imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import TrainingArguments

from reasonrag.dpo.examples import Examples
from reasonrag.dpo.preferences import Preferences
from reasonrag.dpo.train import PairRun
from reasonrag.prm.labels import read_labels
from reasonrag.prm.measures import measures
from reasonrag.prm.scorer import PRM_FILE, answer_ids, log_odds, padded
from reasonrag.storage.files import write_json
from reasonrag.training.callbacks import GuardedTrainer
from reasonrag.training.folder import MERGED
from reasonrag.training.run import TokenRows
from reasonrag.training.settings import PRMSettings


class PRMRun(PairRun[PRMSettings]):
    """Trains a causal language model to say what each step of some trees is worth.

    `training.json` has under `measures` how good it is on the held-out questions.
    """

    stage = "prm"
    _odds: Any = None  # `[n]` log-odds of the held-out steps

    def read(self, data: str) -> Preferences:
        return read_labels(data, self.settings)

    def trl_config(self) -> tuple[Any, dict[str, Any]]:
        return TrainingArguments, {"remove_unused_columns": False}

    def token_rows(self, examples: Examples) -> dict[str, TokenRows]:
        mean = sum(pair.target.weight for pair in examples.train if pair.target) / len(examples.train)
        numbers: dict[tuple[str, str], int] = {}
        splits: dict[str, TokenRows] = {"train": [], "test": []}
        for split, pairs in (("train", examples.train), ("test", examples.test)):
            for pair in pairs:
                (segment,), target = pair.chosen, pair.target
                assert target is not None
                row = {"input_ids": [*segment.prompt_ids, *segment.completion_ids], "length": segment.tokens}
                row |= {"labels": target.value, "weights": target.weight / mean, "state": target.state}
                splits[split].append(row | {"question": numbers.setdefault(pair.group, len(numbers))})
        return splits

    def build_trainer(self, **common: Any) -> Any:
        return PRMTrainer(token_ids=answer_ids(self.chat, self.settings.tokens), **common)

    def extra_summary(self, trainer: Any) -> dict[str, Any]:
        if self._odds is None:
            return {"measures": None}
        rows, labels = trainer.eval_dataset, trainer.train_dataset["labels"]
        predicted = torch.sigmoid(torch.tensor(self._odds)).tolist()
        question, state, spre = (list(rows[name]) for name in ("question", "state", "labels"))
        found = measures(question, state, predicted, spre, usual=sum(labels) / len(labels))
        known = {name: found[name] or {"mean": float("nan")} for name in ("auc", "sibling_auc", "brier", "ece")}
        said = "held-out steps: AUC {auc[mean]:.3f}, among siblings {sibling_auc[mean]:.3f}, Brier {brier[mean]:.4f}"
        self.log((said + ", ECE {ece[mean]:.3f}").format(**known))
        return {"measures": found}

    def _final_evaluation(self, trainer: Any) -> None:
        if trainer.eval_dataset is not None:
            found = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")  # each process computes a part
            trainer.log(found.metrics)
            self._odds = found.predictions

    def _write_card(self, folder: Path) -> None:
        super()._write_card(folder)
        tokens = self.settings.tokens
        described = {"tokens": tokens, "token_ids": answer_ids(self.chat, tokens), "at": "last token of a step"}
        write_json(folder / PRM_FILE, described)

    def _merge_adapter(self) -> None:
        super()._merge_adapter()
        if (self.out / MERGED).is_dir():
            self._write_card(self.out / MERGED)


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
