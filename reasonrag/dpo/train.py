"""Preference pairs to a policy: direct preference optimisation through TRL (arXiv:2505.14069, sec. 2.2.3 and eq. 3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import nearest
from reasonrag.dpo.examples import ExampleRows, Examples, Pair, open_examples
from reasonrag.dpo.trainer import step_dpo_trainer
from reasonrag.training.model import ModelSource, lora_config
from reasonrag.training.run import Ready, Row, Stage, run
from reasonrag.training.settings import DPOSettings

_SMOOTHED = ("robust", "exo_pair")
LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)


def train(settings: DPOSettings, out: Path, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a policy on pairs, or go on with it where a checkpoint is in `out`.

    Args:
        settings: `data` and `model` have to be there.
        out: a new folder, or one that holds this training.
        log: gets lines for people, on the first process only.

    Returns:
        What `training.json` holds; `{}` on other processes than the first.

    Raises:
        InputError: settings, data, model or folder that cannot work.
        RunError: `out` holds another training, or the loss is no number any more.
        Interrupted: a signal ended it, with a checkpoint; the same call goes on.
    """
    _check(settings)
    own = {
        "beta": settings.beta,
        "loss_type": [settings.loss_type],
        "label_smoothing": settings.label_smoothing,
        "precompute_ref_log_probs": settings.reference == "precomputed",
    }

    def data(source: ModelSource, say: Callable[[str], None]) -> ExampleRows:
        examples = open_examples(settings, source.chat(), context=source.context(), say=say)
        return ExampleRows(examples, lambda found: pair_rows(found, settings))

    return run(Stage("dpo", _config, own, data, step_dpo_trainer, _make), settings, out, log=log)


def pair_rows(examples: Examples, settings: DPOSettings) -> dict[str, list[Row]]:
    """Token rows by split, as `dpo.trainer` describes them; weights have mean 1 over the train set.

    Raises:
        DataError: weights or reward margins are asked for, and there are pairs without a margin.
    """
    weighted, margined = settings.weight == "margin", settings.reward_margin > 0
    pairs = [*examples.train, *examples.test]
    unknown = sum(pair.margin is None for pair in pairs)
    if (weighted or margined) and unknown:
        raise DataError(
            f"{examples.source}: {unknown} of {len(pairs)} pairs have no margin of rewards, which weight and "
            "reward_margin need; leave those out, or give pairs with a margin column"
        )
    mean = sum(pair.margin or 0.0 for pair in examples.train) / max(len(examples.train), 1)
    if weighted and mean <= 0:
        raise DataError(f"{examples.source}: the margins are {mean:g} on average, so they cannot weigh the pairs")
    as_steps = all(_is_step(pair) for pair in pairs)

    def row(pair: Pair) -> Row:
        ids = _step_row(pair) if as_steps else _segments_row(pair)
        if weighted:
            ids["pair_weight"] = (pair.margin or 0.0) / mean
        if margined:
            ids["pair_margin"] = settings.reward_margin * (pair.margin or 0.0)
        return ids

    return {"train": [row(pair) for pair in examples.train], "test": [row(pair) for pair in examples.test]}


def _is_step(pair: Pair) -> bool:
    return len(pair.chosen) == len(pair.rejected) == 1 and pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids


def _step_row(pair: Pair) -> Row:
    (chosen,), (rejected,) = pair.chosen, pair.rejected
    return {
        "prompt_ids": list(chosen.prompt_ids),
        "chosen_ids": list(chosen.completion_ids),
        "rejected_ids": list(rejected.completion_ids),
    }


def _segments_row(pair: Pair) -> Row:
    row: Row = {}
    for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        row[f"{side}_prompts"] = [list(s.prompt_ids) for s in segments]
        row[f"{side}_completions"] = [list(s.completion_ids) for s in segments]
    return row


def _make(ready: Ready) -> Any:
    settings: DPOSettings = ready.settings
    new_adapter = settings.method == "lora" and not ready.source.is_adapter
    frozen = settings.reference == "frozen" or (settings.reference == "auto" and settings.method == "full")
    if settings.reference == "adapter_off" and ready.source.is_adapter:
        raise ConfigError(
            f"{settings.model} is an adapter, so the reference is a frozen copy of it, not the model below; "
            "take reference auto, or merge the adapter first"
        )
    return ready.trainer(
        model=ready.model,
        # Loaded here and not by TRL, which would not ask for the revision.
        ref_model=ready.load() if frozen else None,
        args=ready.arguments,
        train_dataset=ready.train,
        eval_dataset=ready.test,
        processing_class=ready.tokenizer,
        peft_config=lora_config(settings.lora, revision=settings.revision) if new_adapter else None,
        sft_weight=settings.sft_weight,
    )


def _config() -> Any:
    from trl import DPOConfig

    return DPOConfig


def _check(settings: DPOSettings) -> None:
    if settings.loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type {settings.loss_type!r} is unknown{nearest(settings.loss_type, LOSS_TYPES)}")
    if settings.loss_type == "exo_pair" and not settings.label_smoothing:
        raise ConfigError("loss_type exo_pair needs label_smoothing above 0; its authors take 0.001")
    if settings.label_smoothing and settings.loss_type not in _SMOOTHED:
        raise ConfigError(
            f"loss_type {settings.loss_type} knows no label_smoothing ({settings.label_smoothing}); "
            f"only {' and '.join(_SMOOTHED)} do"
        )
