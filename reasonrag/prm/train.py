"""A process reward model from trees: `prm train`. Labels, training, and how good the model is on held-out steps.

A step's SPRE is its soft label, weighted by its certainty.
Imports transformers, so it is itself imported late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import TrainingArguments

from reasonrag.core.bootstrap import Measure, Ratio, intervals
from reasonrag.core.config import PolicyCard
from reasonrag.core.errors import DataError
from reasonrag.core.settings import named_path
from reasonrag.dpo.demonstrations import read_step
from reasonrag.dpo.pairs import path_from_root, split_trees
from reasonrag.dpo.preferences import CheckedRow, Preferences, StepSides, Target
from reasonrag.dpo.token_rows import TokenPairs, data_of, tokenise
from reasonrag.llm.local import padded
from reasonrag.prm.scorer import PRM_FILE, answer_ids, log_odds
from reasonrag.spre.decisions import Decision, decisions_of
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row
from reasonrag.training.run import Log, TokenRows, TrainingData, TrainingRun
from reasonrag.training.settings import PRMSettings
from reasonrag.training.trainer import GuardedTrainer

_COLUMNS = (
    *("dataset", "question_id", "node_id", "parent_id", "depth", "origin", "action", "content", "visits", "f1"),
    *("prompt", "prefix", "stop", "text", "finish_reason", "token_ids", "passages.list.element.id", "grade"),
)
BINS = 10
_MARGIN = 0.01  # siblings with a smaller difference of SPRE are not compared, as in pairs


def train_prm(settings: PRMSettings, out: Path | None, *, log: Log = print) -> TrainingRun[PRMSettings]:
    """Train a causal language model to predict the SPRE of each step of some trees.

    `training.json` has under `measures` how good it is on the held-out questions.
    """
    run = TrainingRun("prm", settings, out, TrainingArguments, log=log, remove_unused_columns=False)
    token_ids = answer_ids(run.chat, settings.tokens)
    run.model_files[PRM_FILE] = {"tokens": settings.tokens, "token_ids": token_ids, "at": "last token of a step"}

    def read() -> TrainingData:
        labels = read_labels(data_of(settings), settings)
        steps = tokenise(labels, settings, run.chat, context=run.source.context(), log=run.log)
        return TrainingData(steps.checksum, steps.card, steps.facts, partial(label_rows, steps))

    with run:
        if rows := run.open(read):
            trainer = run.build_trainer(PRMTrainer, *rows, token_ids=token_ids)
            run.train(trainer)
            run.save(trainer, measures=None if trainer.eval_dataset is None else measure_held_out(trainer, run.log))
    return run


def label_rows(steps: TokenPairs) -> dict[str, TokenRows]:
    """Return `input_ids`, `labels` (SPRE), `weights` with mean 1, `state` and `question` by split."""
    # Weights with mean 1 leave the learning rate as it is, however sure the labels are.
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


def measure_held_out(trainer: Any, log: Log) -> dict[str, Any]:
    """Return and print the measures of a trained model on its held-out steps."""
    rows, labels = trainer.eval_dataset, trainer.train_dataset["labels"]
    prediction = trainer.predict(rows, metric_key_prefix="eval")  # each process computes a part
    trainer.log(prediction.metrics)
    values = torch.sigmoid(torch.tensor(prediction.predictions)).tolist()
    question, state, spre = (list(rows[name]) for name in ("question", "state", "labels"))
    measured = measures(question, state, values, spre, usual=sum(labels) / len(labels))
    known = {name: value["mean"] for name, value in measured.items() if isinstance(value, dict)}
    log("held-out steps: " + ", ".join(f"{name} {mean:.3f}" for name, mean in known.items()))
    return measured


def read_labels(data: str, settings: PRMSettings) -> Preferences:
    """Read the labelled steps of a run of build-tree; raise DataError or RunError if it is unfinished or has none."""
    path = named_path(data)
    config, summary = read_run(path)
    alpha = settings.alpha or config.value.alpha
    splits: dict[str, list[CheckedRow]] = {"train": [], "test": []}
    for split, _, tree in split_trees(path, _COLUMNS, settings.test_share):
        splits[split] += label_steps(tree, alpha=alpha, read_ids=config.policy.reads_ids)
    if not splits["train"]:
        raise DataError(
            f"{data}: no step that is not held out has an answer below it; build trees of more questions, "
            "with more --iterations, or lower --test-share"
        )
    card = PolicyCard.of(config.model_dump(mode="json"), (summary.get("content") or {}).get("prompts"))
    return Preferences(splits["train"], splits["test"], card, noun="steps")


def label_steps(tree: Sequence[Row], *, alpha: float, read_ids: bool = True) -> Iterator[CheckedRow]:
    """Yield each decision of a tree once, as its earliest node wrote it, with its SPRE and how sure that is.

    A decision below which no trajectory has an answer has no value, never 0, and is left out. Only
    answers are certain. `tree` are rows of `tables.tree_schema` of one question, by id; `alpha` and
    `read_ids` are as in `derive_pairs`.
    """
    states: dict[tuple[object, str], int] = {}  # the first parent after which a prompt was read
    for node, decision in zip(tree, decisions_of(tree, alpha=alpha), strict=True):
        if decision is None or decision.reward is None or decision.nodes[0] != node["node_id"]:
            continue
        step = read_step(path_from_root(tree, node), read_ids=read_ids)
        state = states.setdefault((step.prompt.messages, step.prompt.prefix), node["parent_id"])
        target = Target(decision.estimate, certainty(decision), state)
        place, group = f"question {node['question_id']}, node {node['node_id']}", (node["dataset"], node["question_id"])
        sides, kinds = StepSides((step,), ()), (node["action"], "")
        yield CheckedRow(place, sides, None, node["depth"] - 1, group, kinds, target)


def certainty(decision: Decision) -> float:
    """Return how sure the reward of a decision is, in [0, 1]: of n complete trajectories, n / (n + 1)."""
    trajectories = len(decision.ends) + len(decision.fresh)
    return 1.0 if decision.known else trajectories / (trajectories + 1)


def measures(
    question: Sequence[int], state: Sequence[int], predicted: Sequence[float], spre: Sequence[float], *, usual: float
) -> dict[str, Any]:
    """Return measures of `[n]` held-out steps, n >= 1, each with its 95 % interval over questions, or None if unknown.

    Args:
        question: number of the question of each step.
        state: number, within the question, of the state in which it was taken.
        predicted: value of the model, in [0, 1].
        spre: the value that it should predict, in [0, 1].
        usual: mean SPRE in training, the prediction of a model that knows nothing.

    Returns:
        `sibling_auc`: share of any two steps in one state, with different SPRE, that are in
        the right order, half for a tie: what choosing steps rests on. `brier`: mean squared
        difference from SPRE; `usual_brier`: that of `usual`. `ece`: expected calibration
        error over ten equal bins; its interval keeps the sign of each bin's error.
    """
    # `[n]` columns; `place` is the number of each step's question, over which the intervals resample.
    values, targets = np.array(predicted), np.array(spre)
    names, place = np.unique(np.array(question), return_inverse=True)
    gap = values - targets
    bins = np.minimum(values * BINS, BINS - 1).astype(int)
    # |sum of gaps| of each bin as a sum over steps: every gap gets the sign of its bin's error.
    sign = np.sign(np.bincount(bins, gap, BINS))[bins]
    states: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step, its_state in enumerate(zip(question, state, strict=True)):
        states[its_state].append(step)
    ordered = []  # steps in one state, the better one first
    for steps in states.values():
        for first, second in permutations(steps, 2):
            if spre[first] - spre[second] >= _MARGIN:
                ordered.append((first, second))
    better, worse = np.array(ordered, int).reshape(-1, 2).T
    right = (np.sign(values[better] - values[worse]) + 1) / 2

    def ratio(part: Any, rows: Any = slice(None)) -> Ratio:
        """Sum a column over the steps of each question, and count those steps."""
        questions_of_rows = place[rows]
        sums = np.bincount(questions_of_rows, part, len(names))
        return Ratio(sums.tolist(), np.bincount(questions_of_rows, minlength=len(names)).astype(float).tolist())

    columns: dict[str, Measure] = {
        "sibling_auc": ratio(right, better),
        "brier": ratio(gap**2),
        "usual_brier": ratio((usual - targets) ** 2),
        "ece": ratio(sign * gap),
    }
    by_name = {name: interval and asdict(interval) for name, interval in intervals(columns, seed=0).items()}
    return by_name | {"steps": len(targets), "questions": len(names), "siblings": len(right), "usual": usual}


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
    input_ids, attention_mask = padded([row["input_ids"] for row in rows], side="right")
    values = {name: torch.tensor([float(row[name]) for row in rows]) for name in ("labels", "weights")}
    return {"input_ids": input_ids, "attention_mask": attention_mask, **values}
