"""Settings of online training, named as in TRL if TRL has them; `trainer.*` sets its other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.config import (
    Config,
    FormatConfig,
    JudgeConfig,
    ModelConfig,
    QuestionsConfig,
    RetrievalConfig,
    ValueConfig,
)
from reasonrag.core.settings import EXECUTION, Flag, Section, Tree, carried_settings, gather, merge, validate
from reasonrag.rewards.settings import RewardSettings
from reasonrag.training.settings import TrainSettings


class RolloutSettings(Section):
    """How trajectories are made.

    With `top_p` below 1 they follow another distribution than the trainer's log-probabilities, which `importance`
    cannot correct: it has to be off then.
    """

    group_size: Annotated[
        int, Field(ge=2, description="trajectories per question: G of GRPO"), Flag("--group-size")
    ] = 8
    questions_per_step: Annotated[
        int, Field(ge=1, description="questions per batch of rollouts"), Flag("--questions-per-step")
    ] = 16
    minibatches: Annotated[int, Field(ge=1, description="optimizer steps per batch of rollouts")] = 1
    temperature: Annotated[float, Field(gt=0, le=5, description="sampling temperature of the rollouts")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus sampling: probability mass that is kept")] = 1.0
    max_tokens: Annotated[int, Field(ge=1, description="maximum tokens of one completion")] = 512
    max_trajectory_tokens: Annotated[
        int | None,
        Field(ge=8, description="maximum tokens of prompt and turn; a longer trajectory counts as truncated"),
    ] = None
    engine: Annotated[
        Literal["auto", "generate", "continuous", "vllm-server"],
        Field(
            description="rollout engine. generate: transformers with the trainer's own weights; continuous: its "
            "continuous batching; vllm-server: a server that gets the weights before each batch; "
            "auto: continuous on a GPU if the weights have 16 bits, else generate"
        ),
        EXECUTION,
    ] = "auto"
    url: Annotated[
        str | None,
        Field(description="URL of a vLLM server for rollouts, which gets the weights before each batch"),
        Flag("--rollout-url"),
        EXECUTION,
    ] = None
    served_model: Annotated[
        str | None, Field(description="name of the policy at the vLLM server (default: that of the model)"), EXECUTION
    ] = None
    batch_size: Annotated[
        int, Field(ge=1, description="trajectories per batch of an engine in this process"), EXECUTION
    ] = 64
    concurrency: Annotated[int, Field(ge=1, description="maximum requests in flight at a vLLM server"), EXECUTION] = 256


class SamplingSettings(Section):
    """DAPO's dynamic sampling: groups in which all rewards are equal are dropped and refilled (arXiv:2503.14476)."""

    dynamic: Annotated[
        bool,
        Field(description="drop groups whose rewards are all equal, and draw other questions (DAPO)"),
        Flag("--dynamic-sampling/--no-dynamic-sampling"),
    ] = False
    max_rounds: Annotated[int, Field(ge=1, description="maximum rounds of refilling per batch")] = 3


class OutageSettings(Section):
    """What happens if rewards are missing: a failure of the judge never becomes a reward."""

    max_unscored: Annotated[
        float, Field(ge=0, le=1, description="maximum share of a batch without a reward"), EXECUTION
    ] = 0.25
    retries: Annotated[
        int, Field(ge=0, description="retries of missing rewards before the training run stops"), EXECUTION
    ] = 3
    wait_s: Annotated[
        float,
        Field(ge=0, description="seconds before the first retry; doubled before each further one"),
        EXECUTION,
    ] = 5.0


class GuardSettings(Section):
    """When a collapsing run is stopped; its state and best policy are kept. 0 turns a guard off."""

    window: Annotated[int, Field(ge=1, description="optimizer steps that the guards average over"), EXECUTION] = 10
    format_rate_drop: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="stop if the share of well-formed trajectories is this far below that of the best window; "
            "0 disables",
        ),
        EXECUTION,
    ] = 0.4
    min_entropy: Annotated[
        float, Field(ge=0, description="stop below this policy entropy, in nats per token; 0 disables"), EXECUTION
    ] = 0.0
    max_length_growth: Annotated[
        float,
        Field(ge=0, description="stop if trajectories are this many times as long as in the first window; 0 disables"),
        EXECUTION,
    ] = 4.0


class ValidationSettings(Section):
    """Held-out questions that choose the best policy."""

    data: Annotated[
        str | None,
        Field(description="validation questions, as for --dataset (default: the dev split of the training questions)"),
        EXECUTION,
    ] = None
    split: Annotated[str | None, Field(description="split of a known data set: train, dev or test"), EXECUTION] = None
    limit: Annotated[
        int | None, Field(ge=1, description="use a random sample of this many validation questions"), EXECUTION
    ] = 200
    steps: Annotated[int, Field(ge=0, description="optimizer steps between two validations; 0 disables"), EXECUTION] = (
        20
    )
    temperature: Annotated[
        float, Field(ge=0, le=5, description="sampling temperature; 0 is greedy decoding"), EXECUTION
    ] = 0.0
    metric: Annotated[
        Literal["em", "f1", "acc", "reward"],
        Field(description="metric that chooses the best policy; reward: the training reward"),
        EXECUTION,
    ] = "em"


class RLSettings(TrainSettings):
    """Group-relative policy optimisation on rollouts with retrieval (GRPO, DAPO)."""

    seed: Annotated[
        int, Field(description="random seed; the same seed repeats every random choice"), Flag("--seed")
    ] = 0
    data: Annotated[
        str | None,
        Field(
            description="questions: a known data set (hotpotqa, 2wikimultihopqa, musique, popqa, ...), demo, or a "
            "JSONL or Parquet file"
        ),
        Flag("--dataset"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="model to train: a folder, a Hub id, or demo[:FORMAT] for a shipped policy"),
        Flag("--model"),
        EXECUTION,
    ] = None
    split: Annotated[
        str | None, Field(description="split of a known data set: train, dev or test"), Flag("--split"), EXECUTION
    ] = None
    world_seed: Annotated[int, Field(description="seed of the demo world"), Flag("--world-seed"), EXECUTION] = 0
    retrieval: RetrievalConfig = RetrievalConfig()
    format: FormatConfig = FormatConfig(name="search_r1", max_steps=5)
    judge: JudgeConfig = JudgeConfig()
    reward: RewardSettings = RewardSettings()
    plans: Annotated[
        str | None,
        Field(description="reference plans for the reward search-p1: a file that `rl plan` wrote"),
        Flag("--plans"),
        EXECUTION,
    ] = None
    rollout: RolloutSettings = RolloutSettings()
    sampling: SamplingSettings = SamplingSettings()
    outage: OutageSettings = OutageSettings()
    guards: GuardSettings = GuardSettings()
    validation: ValidationSettings = ValidationSettings()

    loss_type: Annotated[
        Literal["dapo", "grpo", "dr_grpo", "bnpo"],
        Field(
            description="loss function, by its name in TRL. The choices differ in how the loss is averaged over tokens"
        ),
        Flag("--loss-type"),
    ] = "dapo"
    beta: Annotated[
        float,
        Field(
            ge=0,
            description="KL weight: how strongly the policy is held to the reference model. With 0, no reference "
            "model is loaded",
        ),
        Flag("--beta"),
    ] = 0.0
    epsilon: Annotated[float, Field(gt=0, description="clipping range of the probability ratio around 1")] = 0.2
    epsilon_high: Annotated[
        float | None,
        Field(gt=0, description="upper clipping range of the probability ratio, clip-higher (default: epsilon)"),
    ] = None
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Field(
            description="what divides the advantages: the standard deviation of the group, that of the batch, or "
            "nothing"
        ),
    ] = "group"
    mask_truncated: Annotated[
        bool, Field(description="exclude trajectories that a token limit cut off from the loss")
    ] = True
    importance: Annotated[
        Literal["auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Field(
            description="importance sampling correction between engine and trainer; auto: token_truncate with a "
            "server, else off"
        ),
    ] = "auto"
    importance_max: Annotated[float, Field(gt=1, description="threshold of the importance ratio")] = 2.0
    max_steps: Annotated[int, Field(ge=1, description="optimizer steps"), Flag("--max-steps")] = 200
    per_device_train_batch_size: Annotated[
        int, Field(ge=1, description="training examples per forward pass on each device"), Flag("--batch-size")
    ] = 8
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="follows from the other batch settings; must not be set")
    ] = 1
    lr_scheduler_type: Annotated[str, Field(description="learning rate schedule, by its name in transformers")] = (
        "constant"
    )
    logging_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two lines of metrics"), EXECUTION
    ] = 1
    save_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between checkpoints"), Flag("--save-steps"), EXECUTION
    ] = 20

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _follows(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                "it follows from rollout.questions_per_step, rollout.group_size and per_device_train_batch_size; "
                "leave it out"
            )
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> RLSettings:
        if (self.rollout.engine == "vllm-server") != (self.rollout.url is not None):
            raise ValueError("rollout.engine vllm-server and rollout.url go together; give both, or neither")
        if self.save_steps % self.rollout.minibatches:
            raise ValueError(
                f"save_steps {self.save_steps} would save in the middle of a batch of rollouts, which serves "
                f"{self.rollout.minibatches} steps; take a multiple"
            )
        if self.rollout.top_p < 1 and self.importance != "off":
            raise ValueError("rollout.top_p below 1 changes the sampling distribution; set importance to off")
        if self.judge.model is not None and self.judge.spec is None:
            raise ValueError("a judge's model is named, but no judge; add --judge with its server, or leave it out")
        return self

    def accumulation(self, processes: int) -> int:
        """Return the forward passes of one optimizer step on each process.

        Raises:
            ValueError: the batch cannot be divided.
        """
        rollout = self.rollout
        if rollout.questions_per_step % processes:
            raise ValueError(
                f"rollout.questions_per_step {rollout.questions_per_step} cannot be shared by {processes} processes, "
                "each of which holds whole groups; take a multiple"
            )
        rows = rollout.questions_per_step * rollout.group_size
        share = rollout.minibatches * processes * self.per_device_train_batch_size
        if rows % share:
            raise ValueError(
                f"{rollout.questions_per_step} questions with {rollout.group_size} trajectories are {rows} rows, which "
                f"{rollout.minibatches} minibatches on {processes} processes cannot divide into passes of "
                f"{self.per_device_train_batch_size} (per_device_train_batch_size); change one of them"
            )
        return rows // share

    def as_config(self) -> Config:
        """Return the settings that online training shares with the other commands, as their configuration."""
        return Config(
            seed=self.seed,
            questions=QuestionsConfig(
                dataset=self.data, split=self.split, limit=self.limit, world_seed=self.world_seed
            ),
            retrieval=self.retrieval,
            policy=ModelConfig(
                temperature=self.rollout.temperature, top_p=self.rollout.top_p, max_tokens=self.rollout.max_tokens
            ),
            judge=self.judge,
            value=ValueConfig(kind="judge"),  # a `Config` accepts a judge only there; no tree is built
            format=self.format,
        )


def load_rl_settings(
    presets: Mapping[str, Tree],
    *,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RLSettings:
    """Resolve the settings. The format and prompts saved with the policy are defaults, which `overrides` replace.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a contradiction.
    """
    explicit = gather(presets, preset=preset, file=file, overrides=overrides)
    model = str(explicit.get("model") or "")
    carried = carried_settings(model if model.partition(":")[0] == "demo" else f"hf:{model}") if model else {}
    tokens = carried.pop("policy", {}).get("max_tokens")
    tree: Tree = {**carried, **({"rollout": {"max_tokens": tokens}} if tokens else {})}
    merge(tree, explicit)
    return validate(RLSettings, tree)
