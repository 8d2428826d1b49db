"""Settings of training runs. Names are TRL's; `trainer.*` sets every other argument of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from reasonrag.core.settings import CHAT_TEMPLATE, MOST, Section, Tree, execution, setting


def _learning_rate(rates: Mapping[str, float]) -> Any:
    shown = f"{rates['full']:g} for all weights, {rates['lora']:g} for adapters"
    return setting(None, f"peak learning rate (default: {shown})", "--learning-rate", gt=0, le=1)


class LoraSettings(Section):
    """Low-rank adapters (peft); unused with `method: full`."""

    r: int = setting(16, "rank of the adapters", "--lora-r", ge=1)
    alpha: int = setting(32, "scale of the adapters: their output is multiplied by alpha / r", "--lora-alpha", ge=1)


class TrainSettings(Section):
    """Settings that DPO, SFT and online training share."""

    # Default learning rates. At the rate of full training, adapters learn nothing.
    rates: ClassVar[Mapping[str, float]] = {"full": 1e-6, "lora": 1e-5}
    # Optimizer steps between two lines of metrics, and between two evaluations on held-out rows.
    # Below 1 it is a share of all steps, so that short runs log every step.
    log_every: ClassVar[float] = 0.01
    eval_every: ClassVar[float | None] = None

    seed: int = setting(0, "random seed; the same seed repeats every random choice", "--seed")
    data: str | None = execution(
        None,
        "a run's folder; or preference pairs as Parquet or JSONL files, or OWNER/NAME[@REVISION][:CONFIG] on the Hub",
        "--data",
    )
    model: str | None = execution(
        None, "model to train: a folder, a Hub id, or demo[:FORMAT] for a shipped policy", "--model"
    )
    revision: str | None = setting(None, "revision of a Hub model: commit, tag or branch")
    chat_template: str | None = execution(None, f"{CHAT_TEMPLATE}. It is saved with the policy", "--chat-template")
    method: Literal["lora", "full"] = setting(
        "lora", "what to train: low-rank adapters (lora) or all weights (full)", "--method"
    )
    lora: LoraSettings = LoraSettings()
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "dtype of the weights (default: bfloat16 for adapters on a GPU, else float32)"
    )
    limit: int | None = setting(None, "use a random sample of this many questions (default: all)", "--limit", ge=1)
    min_questions: int = execution(
        30, "refuse to train on fewer questions: a policy would learn little else than them", "--min-questions", ge=1
    )
    learning_rate: float | None = _learning_rate(rates)
    lr_scheduler_type: str = setting("cosine", "learning rate schedule, by its name in transformers")
    warmup_ratio: float = setting(0.1, "share of the steps during which the learning rate rises", ge=0, lt=1)
    per_device_train_batch_size: int = setting(
        2, "training examples per forward pass on each device", "--batch-size", ge=1
    )
    save_steps: int = execution(200, "training steps between checkpoints", "--save-steps", ge=1)
    device: Literal["auto", "cpu", "mps"] = execution("auto", "device; auto: the NVIDIA GPUs, if there are any")
    merge: bool = execution(False, "also write the adapters merged into the model, to OUT/merged", "--merge/--no-merge")
    trainer: dict[str, Any] = setting({}, "any other argument of TRL's trainer, by its name")

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_method(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("learning_rate") is None:
            return tree | {"learning_rate": cls.rates.get(tree.get("method", "lora"))}
        return tree


class PairSettings(TrainSettings):
    """Settings of training runs on recorded steps: DPO and SFT."""

    eval_every = 0.1

    gradient_accumulation_steps: int = setting(8, "forward passes per optimizer step", "--accumulation", ge=1)
    max_length: int | None = setting(
        None, "maximum tokens of prompt and step; longer examples are dropped, never cut", "--max-length", ge=8
    )
    max_dropped: float = execution(
        0.01, "maximum share of a split that may be dropped as too long", "--max-dropped", ge=0, le=1
    )
    min_examples: int = execution(
        200, "refuse to train on fewer pairs, or steps: so few teach noise", "--min-examples", ge=1
    )
    num_train_epochs: float = setting(1.0, "passes over the training data", "--epochs", gt=0, le=MOST)
    max_steps: int = setting(-1, "optimizer steps; -1 trains for num_train_epochs", ge=-1)


class DPOSettings(PairSettings):
    """Direct preference optimisation on steps (arXiv:2505.14069, eq. 3, with the reference model it leaves out)."""

    beta: float = setting(
        0.3, "KL weight: how strongly the policy is held to the reference model", "--beta", gt=0, le=1000
    )
    loss_type: str = setting(
        "sigmoid,sft",
        "loss function, by its name in TRL. Several with commas between them are added up; sft, the chosen step's "
        "negative log-likelihood, keeps it likely (arXiv:2404.19733)",
        "--loss-type",
    )
    smooth_by_confidence: bool = setting(
        False,
        "smooth the labels: a pair counts the other way round, too, by the probability that its order is wrong, which "
        "is 1 - confidence (cDPO; 0 where confidence is unknown)",
        "--smooth-by-confidence/--no-smooth-by-confidence",
    )
    reference: Literal["auto", "frozen", "precomputed"] = execution(
        "auto",
        "reference model: a frozen copy, or precomputed log-probabilities; auto: the model without its adapter, or a "
        "frozen copy if all weights are trained",
        "--reference",
    )
    reference_model: str | None = setting(None, "reference model, as --model (default: the model before training)")


class SFTSettings(PairSettings):
    """Supervised fine-tuning on whole good trajectories, or on chosen steps: DPO's rival in the paper's Table 3."""

    rates: ClassVar[Mapping[str, float]] = {"full": 1e-5, "lora": 2e-4}

    examples: Literal["chosen", "trajectories"] = setting(
        "chosen",
        "steps to learn: chosen ones of preference pairs, or all of the best trajectories of a run of build-tree",
        "--examples",
    )
    per_question: int = setting(2, "maximum trajectories of one question to learn", "--per-question", ge=1)
    min_reward: float = setting(0.8, "minimum F1 of the answer of a trajectory to learn", "--min-reward", ge=0, le=1)
    test_share: float = setting(0.1, "share of the questions that form the test split", "--test-share", ge=0, lt=1)
    learning_rate: float | None = _learning_rate(rates)

    @model_validator(mode="after")
    def _about_trajectories(self) -> SFTSettings:
        choosing = ("per_question", "min_reward", "test_share")
        changed = [name for name in choosing if getattr(self, name) != type(self).model_fields[name].default]
        if self.examples == "chosen" and changed:
            raise ValueError(f"{', '.join(changed)} choose trajectories; add --examples trajectories")
        return self


class PRMSettings(PairSettings):
    """A process reward model: the probability of one of two tokens at the end of a step is the value of the step."""

    rates = SFTSettings.rates

    alpha: float | None = setting(
        None, "SPRE decay per action; 1 removes the shortest-path term (default: value.alpha)", "--alpha", gt=0, le=1
    )
    tokens: tuple[str, str] = setting(
        ("yes", "no"), "the two tokens; each has to be one token of the vocabulary. Math-Shepherd takes + and -"
    )
    test_share: float = setting(0.1, "share of the questions that form the test split", "--test-share", ge=0, lt=1)
    learning_rate: float | None = _learning_rate(rates)


_DEMO: Tree = {
    "model": "demo",
    "method": "full",
    "device": "cpu",
    "dtype": "float32",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "min_examples": 1,
    "min_questions": 1,
}
DPO_PRESETS: dict[str, Tree] = {
    # The published configuration: full fine-tuning, 2 pairs per device and optimizer step.
    "reasonrag": {
        "method": "full",
        "loss_type": "sigmoid",
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
PRM_PRESETS: dict[str, Tree] = {"demo": {**_DEMO, "learning_rate": 3e-4, "num_train_epochs": 1}}
