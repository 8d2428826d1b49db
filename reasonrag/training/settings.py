"""Settings of training runs. Names are TRL's; `trainer.*` sets every other argument of its configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.settings import EXECUTION, Flag, Section, Tree


class LoraSettings(Section):
    """Low-rank adapters (peft); unused with `method: full`."""

    r: Annotated[int, Field(ge=1, description="rank of the adapters"), Flag("--lora-r")] = 16
    alpha: Annotated[
        int,
        Field(ge=1, description="scale of the adapters: their output is multiplied by alpha / r"),
        Flag("--lora-alpha"),
    ] = 32
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout on the inputs of the adapters")] = 0.0
    target_modules: Annotated[
        str | tuple[str, ...], Field(description="layers that get adapters: all-linear, or names such as q_proj")
    ] = "all-linear"


class TrainSettings(Section):
    """Settings of every training run."""

    seed: Annotated[
        int, Field(description="random seed; the same seed repeats every random choice"), Flag("--seed")
    ] = 0
    data: Annotated[
        str | None,
        Field(
            description="preference pairs: a run's folder, Parquet or JSONL files, or "
            "OWNER/NAME[@REVISION][:CONFIG] on the Hub"
        ),
        Flag("--data"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="model to train: a folder, a Hub id, or demo[:FORMAT] for a shipped policy"),
        Flag("--model"),
        EXECUTION,
    ] = None
    revision: Annotated[str | None, Field(description="revision of a Hub model: commit, tag or branch")] = None
    trust_remote_code: Annotated[bool, Field(description="run Python code that comes with a model")] = False
    method: Annotated[
        Literal["lora", "full"],
        Field(description="what to train: low-rank adapters (lora) or all weights (full)"),
        Flag("--method"),
    ] = "lora"
    lora: LoraSettings = LoraSettings()
    dtype: Annotated[
        str | None,
        Field(description="dtype of the weights (default: bfloat16 for adapters on a GPU, else float32)"),
    ] = None
    limit: Annotated[
        int | None,
        Field(ge=1, description="use a random sample of this many questions (default: all)"),
        Flag("--limit"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0, description="peak learning rate"), Flag("--learning-rate")] = 1e-6
    lr_scheduler_type: Annotated[str, Field(description="learning rate schedule, by its name in transformers")] = (
        "cosine"
    )
    warmup_ratio: Annotated[
        float, Field(ge=0, lt=1, description="share of the steps during which the learning rate rises")
    ] = 0.1
    per_device_train_batch_size: Annotated[
        int, Field(ge=1, description="training examples per forward pass on each device"), Flag("--batch-size")
    ] = 2
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="forward passes per optimizer step"), Flag("--accumulation")
    ] = 8
    weight_decay: Annotated[float, Field(ge=0, description="weight decay of AdamW")] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, description="gradients are clipped to this norm")] = 1.0
    logging_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two lines of metrics"), EXECUTION
    ] = 10
    save_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between checkpoints"), Flag("--save-steps"), EXECUTION
    ] = 200
    save_total_limit: Annotated[int, Field(ge=1, description="maximum checkpoints to keep"), EXECUTION] = 2
    gradient_checkpointing: Annotated[
        bool | None,
        Field(description="recompute activations to save memory (default: on if there is a GPU)"),
        EXECUTION,
    ] = None
    device: Annotated[
        Literal["auto", "cpu"],
        Field(description="device of the training run; auto: the GPUs, if there are any"),
        EXECUTION,
    ] = "auto"
    report_to: Annotated[
        tuple[str, ...],
        Field(description="tracker that also gets the metrics: wandb, tensorboard, ..."),
        Flag("--report-to"),
        EXECUTION,
    ] = ()
    merge: Annotated[
        bool,
        Field(description="also write the adapters merged into the model, to OUT/merged"),
        Flag("--merge/--no-merge"),
        EXECUTION,
    ] = False
    trainer: Annotated[
        dict[str, Any],
        Field(default_factory=dict, description="any other argument of TRL's trainer, by its name"),
    ]

    @field_validator("report_to", "target_modules", mode="before", check_fields=False)
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class PairSettings(TrainSettings):
    """Settings of training runs on recorded steps: DPO and SFT."""

    max_length: Annotated[
        int | None,
        Field(ge=8, description="maximum tokens of prompt and step; longer examples are dropped, never cut"),
        Flag("--max-length"),
    ] = None  # the longest pair, within the model's context
    max_dropped: Annotated[
        float,
        Field(ge=0, le=1, description="maximum share of a split that may be dropped as too long"),
        Flag("--max-dropped"),
        EXECUTION,
    ] = 0.01
    turn_end: Annotated[
        Literal["as_sampled", "always"],
        Field(description="score the end-of-turn token if the policy itself wrote it, or after every step"),
    ] = "as_sampled"
    num_train_epochs: Annotated[float, Field(gt=0, description="passes over the training data"), Flag("--epochs")] = 1.0
    max_steps: Annotated[int, Field(description="optimizer steps; -1 trains for num_train_epochs")] = -1
    eval_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two evaluations on held-out pairs"), EXECUTION
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
        float,
        Field(gt=0, description="KL weight: how strongly the policy is held to the reference model"),
        Flag("--beta"),
    ] = 0.3
    loss_type: Annotated[
        str,
        Field(description="loss function, by its name in TRL. For example sigmoid, ipo or hinge"),
        Flag("--loss-type"),
    ] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, description="assumed share of pairs with swapped labels")] = (
        0.0
    )
    reference: Annotated[
        Literal["auto", "adapter_off", "frozen", "precomputed"],
        Field(
            description="reference model: the adapter switched off, a frozen copy, or precomputed "
            "log-probabilities; auto: adapter_off, or frozen if all weights are trained"
        ),
        Flag("--reference"),
        EXECUTION,
    ] = "auto"
    weight: Annotated[
        Literal["none", "margin"],
        Field(description="weight of each pair in the loss: the margin of its rewards (scaled to mean 1), or none"),
        Flag("--weight"),
    ] = "none"
    reward_margin: Annotated[
        float,
        Field(ge=0, description="target margin of implicit rewards, as a multiple of the pair's margin"),
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
