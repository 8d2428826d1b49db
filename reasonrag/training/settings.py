"""How a policy is trained. Names are those of TRL; `trainer.*` reaches every other argument of its configuration."""

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
        int, Field(ge=1, description="scale of the adapters: they count alpha / r"), Flag("--lora-alpha")
    ] = 32
    dropout: Annotated[float, Field(ge=0, lt=1, description="share of the adapters' inputs that is dropped")] = 0.0
    target_modules: Annotated[
        str | tuple[str, ...], Field(description="layers that get adapters: all-linear, or names such as q_proj")
    ] = "all-linear"


class TrainSettings(Section):
    """What every training has in common."""

    seed: Annotated[int, Field(description="of order and adapters"), Flag("--seed")] = 0
    data: Annotated[
        str | None,
        Field(description="a run's folder, Parquet or JSONL files, or OWNER/NAME[@REVISION][:CONFIG] on the Hub"),
        Flag("--data"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="the policy to train: a folder or a Hub id; demo is the shipped one"),
        Flag("--model"),
        EXECUTION,
    ] = None
    revision: Annotated[str | None, Field(description="of the model on the Hub: a commit, a tag or a branch")] = None
    trust_remote_code: Annotated[bool, Field(description="run code that comes with a model")] = False
    method: Annotated[Literal["lora", "full"], Field(description="adapters, or all weights"), Flag("--method")] = "lora"
    lora: LoraSettings = LoraSettings()
    dtype: Annotated[
        str | None,
        Field(description="of the weights; if not given, bfloat16 for adapters on a GPU and else float32"),
    ] = None
    limit: Annotated[
        int | None,
        Field(ge=1, description="a seeded sample of this many questions; all of them if not given"),
        Flag("--limit"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0, description="peak of the learning rate"), Flag("--learning-rate")] = (
        1e-6
    )
    lr_scheduler_type: Annotated[str, Field(description="schedule of the learning rate, as transformers names it")] = (
        "cosine"
    )
    warmup_ratio: Annotated[
        float, Field(ge=0, lt=1, description="share of the steps in which the learning rate rises")
    ] = 0.1
    per_device_train_batch_size: Annotated[
        int, Field(ge=1, description="examples of one forward pass on a device"), Flag("--batch-size")
    ] = 2
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="forward passes of one optimizer step"), Flag("--accumulation")
    ] = 8
    weight_decay: Annotated[float, Field(ge=0, description="of AdamW")] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, description="longer gradients are shortened to it")] = 1.0
    logging_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two lines of figures"), EXECUTION
    ] = 10
    save_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between checkpoints"), Flag("--save-steps"), EXECUTION
    ] = 200
    save_total_limit: Annotated[int, Field(ge=1, description="checkpoints that are kept"), EXECUTION] = 2
    gradient_checkpointing: Annotated[
        bool | None,
        Field(description="compute activations twice and keep fewer; on where there is a GPU, if not given"),
        EXECUTION,
    ] = None
    device: Annotated[Literal["auto", "cpu"], Field(description="auto: the GPUs if there are any"), EXECUTION] = "auto"
    report_to: Annotated[
        tuple[str, ...],
        Field(description="where figures go too: wandb, tensorboard, ..."),
        Flag("--report-to"),
        EXECUTION,
    ] = ()
    merge: Annotated[
        bool,
        Field(description="also write the adapters merged into the model, as OUT/merged"),
        Flag("--merge/--no-merge"),
        EXECUTION,
    ] = False
    trainer: Annotated[
        dict[str, Any], Field(default_factory=dict, description="any other argument of TRL's trainer, by its name")
    ]

    @field_validator("report_to", "target_modules", mode="before", check_fields=False)
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class PairSettings(TrainSettings):
    """What DPO and SFT have in common: they train on recorded steps."""

    max_length: Annotated[
        int | None,
        Field(ge=8, description="tokens of prompt and step; longer ones are left out, never cut"),
        Flag("--max-length"),
    ] = None  # the longest of the data, within the model's context
    max_dropped: Annotated[
        float,
        Field(ge=0, le=1, description="share of a split that may be left out as too long"),
        Flag("--max-dropped"),
        EXECUTION,
    ] = 0.01
    turn_end: Annotated[
        Literal["as_sampled", "always"],
        Field(description="score the end-of-turn token where the policy itself wrote it, or after every step"),
    ] = "as_sampled"
    num_train_epochs: Annotated[
        float, Field(gt=0, description="times that the data is gone through"), Flag("--epochs")
    ] = 1.0
    max_steps: Annotated[int, Field(description="optimizer steps; -1: as many as the epochs have")] = -1
    eval_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two looks at held-out pairs"), EXECUTION
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
        float, Field(gt=0, description="how strongly the policy is held to the reference"), Flag("--beta")
    ] = 0.3
    loss_type: Annotated[
        str, Field(description="one of TRL's DPO losses: sigmoid, ipo, hinge, ..."), Flag("--loss-type")
    ] = "sigmoid"
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5, description="share of pairs that may be the wrong way round")
    ] = 0.0
    reference: Annotated[
        Literal["auto", "adapter_off", "frozen", "precomputed"],
        Field(
            description="what the policy is held to: the adapter switched off, a frozen copy, or log-probabilities "
            "computed before; auto: adapter_off, and frozen in full training"
        ),
        Flag("--reference"),
        EXECUTION,
    ] = "auto"
    weight: Annotated[
        Literal["none", "margin"],
        Field(description="weigh pairs by the margin of their rewards (with mean 1), or not"),
        Flag("--weight"),
    ] = "none"
    reward_margin: Annotated[
        float,
        Field(ge=0, description="times the pair's margin: what implicit rewards shall differ by"),
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
        own = self.weight != "none" or self.reward_margin or self.sft_weight
        if own and self.loss_type != "sigmoid":
            raise ValueError("weight, reward_margin and sft_weight go with loss_type sigmoid only")
        return self


class SFTSettings(PairSettings):
    """Supervised fine-tuning on chosen steps: the paper's Table 3 rival."""

    learning_rate: Annotated[float, Field(gt=0, description="peak of the learning rate"), Flag("--learning-rate")] = (
        1e-5
    )


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
    # The published configuration: full fine-tuning, 2 pairs a device and optimizer step.
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
    """The resolved settings of a training.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a contradiction.
    """
    return validate(model, gather(presets, preset=preset, file=file, overrides=overrides))
