"""A batch without a finite gradient changes nothing, and a training run that has none ends."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from reasonrag.core.errors import RunError
from reasonrag.training.trainer import GuardedTrainer, PrintProgress


class Root(torch.nn.Module):
    """The root of weight times x: its gradient is NaN where x is 0, and its value is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sqrt().mean()}


def trained(folder, rows):
    lines = []
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        max_steps=len(rows),
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    trainer = GuardedTrainer(model=Root(), args=arguments, train_dataset=Dataset.from_dict({"x": [*map(float, rows)]}))
    trainer.add_callback(PrintProgress(lines.append))
    trainer.train()
    return trainer, lines


def test_a_batch_without_a_finite_gradient_is_left_out_and_counted(tmp_path):
    trainer, lines = trained(tmp_path / "whole", [1, 4, 0, 4, 1])
    assert "step 3/5  left out, as its gradient is not a finite number" in lines
    assert [entry["step"] for entry in trainer.state.log_history if "skipped" in entry] == [2]
    without, _ = trained(tmp_path / "without", [1, 4, 4, 1])
    assert torch.equal(trainer.model.weight, without.model.weight) and torch.isfinite(trainer.model.weight).all()


@pytest.mark.parametrize("rows", [[0, 1], [1, 0, 0, 0, 1]])
def test_a_training_without_gradients_ends(tmp_path, rows):
    with pytest.raises(RunError, match="the gradient is not a finite number in step"):
        trained(tmp_path, rows)


def test_two_in_a_row_are_no_end(tmp_path):
    trainer, _ = trained(tmp_path, [1, 0, 0, 1, 0, 0, 1])
    assert torch.isfinite(trainer.model.weight).all() and trainer.state.global_step == 7
