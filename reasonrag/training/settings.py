"""Settings of training runs. Names are TRL's; `trainer.*` sets every other argument of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from reasonrag.core.settings import EXECUTION, Flag, Section, Tree, gather, validate


class LoraSettings(Section):
    """Low-rank adapters (peft); unused with `method: full`."""

    r: Annotated[int, Field(ge=1, description="rank of the adapters"), Flag("--lora-r")] = 16
    alpha: Annotated[
        int,
        Field(ge=1, description="scale of the adapters: their output is multiplied by alpha / r"),
        Flag("--lora-alpha"),
    ] = 32
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout probability of the adapters' inputs")] = 0.0
    target_modules: Annotated[
        str | tuple[str, ...], Field(description="layers that get adapters: all-linear, or names such as q_proj")
    ] = "all-linear"


class TrainSettings(Section):
    """Settings of every training run."""

    seed: Annotated[int, Field(description="random seed for data order and adapter initialisation"), Flag("--seed")] = 0
    data: Annotated[
        str | None,
        Field(
            description="preference pairs: a run's folder, Parquet or JSONL files, or a Hub data set "
            "OWNER/NAME[@REVISION][:CONFIG]"
        ),
        Flag("--data"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="model to train: a folder or a Hub id; demo is the shipped policy"),
        Flag("--model"),
        EXECUTION,
    ] = None
    revision: Annotated[str | None, Field(description="revision of a Hub model: commit, tag or branch")] = None
    trust_remote_code: Annotated[bool, Field(description="run code that comes with a model")] = False
    method: Annotated[
        Literal["lora", "full"], Field(description="train LoRA adapters, or all weights"), Flag("--method")
    ] = "lora"
    lora: LoraSettings = LoraSettings()
    dtype: Annotated[
        str | None,
        Field(description="dtype of the weights (default: bfloat16 for adapters on a GPU, otherwise float32)"),
    ] = None
    limit: Annotated[
        int | None,
        Field(ge=1, description="number of questions, sampled with the seed (default: all)"),
        Flag("--limit"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0, description="peak learning rate"), Flag("--learning-rate")] = 1e-6
    lr_scheduler_type: Annotated[str, Field(description="learning rate schedule, by its name in transformers")] = (
        "cosine"
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1, description="share of the optimizer steps used for warmup")] = 0.1
    per_device_train_batch_size: Annotated[
        int, Field(ge=1, description="examples per device and forward pass"), Flag("--batch-size")
    ] = 2
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="forward passes per optimizer step"), Flag("--accumulation")
    ] = 8
    weight_decay: Annotated[float, Field(ge=0, description="weight decay of AdamW")] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, description="gradients with a larger norm are clipped to it")] = 1.0
    logging_steps: Annotated[int, Field(ge=1, description="optimizer steps between log entries"), EXECUTION] = 10
    save_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between checkpoints"), Flag("--save-steps"), EXECUTION
    ] = 200
    save_total_limit: Annotated[int, Field(ge=1, description="number of checkpoints to keep"), EXECUTION] = 2
    gradient_checkpointing: Annotated[
        bool | None,
        Field(description="recompute activations instead of keeping them (default: on a GPU only)"),
        EXECUTION,
    ] = None
    device: Annotated[Literal["auto", "cpu"], Field(description="auto uses the GPUs, if there are any"), EXECUTION] = (
        "auto"
    )
    report_to: Annotated[
        tuple[str, ...],
        Field(description="also send metrics to wandb, tensorboard, ..."),
        Flag("--report-to"),
        EXECUTION,
    ] = ()
    merge: Annotated[
        bool,
        Field(description="also write the model with the adapters merged into it, as OUT/merged"),
        Flag("--merge/--no-merge"),
        EXECUTION,
    ] = False
    trainer: Annotated[
        dict[str, Any],
        Field(default_factory=dict, description="any other argument of TRL's configuration, by its name"),
    ]

    @field_validator("report_to", "target_modules", mode="before", check_fields=False)
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class PairSettings(TrainSettings):
    """Settings of training runs on recorded steps: DPO and SFT."""

    max_length: Annotated[
        int | None,
        Field(ge=8, description="maximum tokens of prompt and step; longer pairs are left out, never cut"),
        Flag("--max-length"),
    ] = None  # the longest pair, within the model's context
    max_dropped: Annotated[
        float,
        Field(ge=0, le=1, description="share of a split that may be left out as too long"),
        Flag("--max-dropped"),
        EXECUTION,
    ] = 0.01
    turn_end: Annotated[
        Literal["as_sampled", "always"],
        Field(description="score an end-of-turn token only if the policy wrote one, or after every step"),
    ] = "as_sampled"
    num_train_epochs: Annotated[float, Field(gt=0, description="number of passes over the data"), Flag("--epochs")] = (
        1.0
    )
    max_steps: Annotated[int, Field(description="number of optimizer steps; -1 trains for whole epochs")] = -1
    eval_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between evaluations on held-out pairs"), EXECUTION
    ] = 200

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"{value} optimizer steps train nothing; give 1 or more, or -1 for whole epochs")
        return value


class DPOSettings(PairSettings):
    """Direct preference optimisation on steps (arXiv:2505.14069, eq. 3, with the reference model it leaves out)."""

    beta: Annotated[
        float, Field(gt=0, description="weight of the KL penalty towards the reference"), Flag("--beta")
    ] = 0.3
    loss_type: Annotated[
        str, Field(description="one of TRL's DPO losses: sigmoid, ipo, hinge, ..."), Flag("--loss-type")
    ] = "sigmoid"
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5, description="assumed share of pairs whose labels are swapped")
    ] = 0.0
    reference: Annotated[
        Literal["auto", "adapter_off", "frozen", "precomputed"],
        Field(
            description="reference model: the model without its adapter, a frozen copy, or log-probabilities that "
            "were precomputed; auto: adapter_off for adapters, frozen for full training"
        ),
        Flag("--reference"),
        EXECUTION,
    ] = "auto"
    weight: Annotated[
        Literal["none", "margin"],
        Field(description="weigh each pair by the margin of its rewards (mean 1), or all pairs alike"),
        Flag("--weight"),
    ] = "none"
    reward_margin: Annotated[
        float,
        Field(ge=0, description="required difference of the implicit rewards, as a multiple of the pair's margin"),
        Flag("--reward-margin"),
    ] = 0.0
    sft_weight: Annotated[
        float,
        Field(ge=0, description="weight of the chosen step's negative log-likelihood in the loss"),
        Flag("--sft-weight"),
    ] = 0.0

    @model_validator(mode="after")
    def _no_contradiction(self) -> DPOSettings:
        if self.reference == "adapter_off" and self.method == "full":
            raise ValueError(
                "reference adapter_off needs an adapter; use --method lora, or a frozen or precomputed one"
            )
        has_our_loss = self.weight != "none" or self.reward_margin or self.sft_weight
        if has_our_loss and self.loss_type != "sigmoid":
            raise ValueError("weight, reward_margin and sft_weight go with loss_type sigmoid only")
        return self


class SFTSettings(PairSettings):
    """Supervised fine-tuning on chosen steps: the rival of DPO in the paper's Table 3."""

    learning_rate: Annotated[float, Field(gt=0, description="peak learning rate"), Flag("--learning-rate")] = 1e-5


_DEMO: Tree = {
    "model": "demo",
    "method": "full",
    "device": "cpu",
    "dtype": "float32",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "eval_steps": 50,
}
DPO_PRESETS: dict[str, Tree] = {
    # The published configuration: full fine-tuning, 2 pairs per device and optimizer step.
    "reasonrag": {
        "method": "full",
        "beta": 0.3,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.2,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_length": 10_000,
    },
    "demo": {**_DEMO, "beta": 0.3, "learning_rate": 1e-4, "num_train_epochs": 2},
}
SFT_PRESETS: dict[str, Tree] = {
    "reasonrag": {"method": "full", "learning_rate": 1e-6, "warmup_ratio": 0.2, "max_length": 10_000},
    "demo": {**_DEMO, "learning_rate": 2e-4, "num_train_epochs": 3},
}

T = TypeVar("T", bound=TrainSettings)


def load_settings(
    model: type[T],
    presets: Mapping[str, Tree],
    *,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> T:
    """Return the resolved settings of a training run.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a contradiction.
    """
    return validate(model, gather(presets, preset=preset, file=file, overrides=overrides))
