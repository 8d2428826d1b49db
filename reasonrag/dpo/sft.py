"""Supervised fine-tuning on chosen steps, through TRL's SFTTrainer: the rival in arXiv:2505.14069, Table 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasonrag.dpo.examples import ExampleRows, Examples, open_examples, sft_segments
from reasonrag.training.model import ModelSource, lora_config
from reasonrag.training.run import Ready, Row, Stage, run
from reasonrag.training.settings import SFTSettings

_NOT_SCORED = -100


def train(settings: SFTSettings, out: Path, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a policy on the chosen steps of pairs, each once, or go on with it where a checkpoint is in `out`.

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

    def data(source: ModelSource, say: Callable[[str], None]) -> ExampleRows:
        return ExampleRows(open_examples(settings, source.chat(), context=source.context(), say=say), step_rows)

    return run(Stage("sft", _config, {}, data, _trainer, _make), settings, out, log=log)


def step_rows(examples: Examples) -> dict[str, list[Row]]:
    """`input_ids` and `labels` by split: only the tokens of the step are scored."""
    return {
        split: [
            {
                "input_ids": [*segment.prompt_ids, *segment.completion_ids],
                "labels": [_NOT_SCORED] * len(segment.prompt_ids) + list(segment.completion_ids),
            }
            for segment in sft_segments(pairs)
        ]
        for split, pairs in (("train", examples.train), ("test", examples.test))
    }


def _make(ready: Ready) -> Any:
    settings: SFTSettings = ready.settings
    new_adapter = settings.method == "lora" and not ready.source.is_adapter
    return ready.trainer(
        model=ready.model,
        args=ready.arguments,
        train_dataset=ready.train,
        eval_dataset=ready.test,
        processing_class=ready.tokenizer,
        peft_config=lora_config(settings.lora, revision=settings.revision) if new_adapter else None,
    )


def _trainer() -> Any:
    from trl import SFTTrainer

    return SFTTrainer


def _config() -> Any:
    from trl import SFTConfig

    return SFTConfig
