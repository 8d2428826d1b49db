"""How a policy is trained online. Names are those of TRL where TRL has one; `trainer.*` reaches its other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.config import Config, FormatConfig, JudgeConfig, ModelConfig, QuestionsConfig, RetrievalConfig
from reasonrag.core.settings import EXECUTION, Flag, Section, Tree, carried_settings, gather, merge, validate
from reasonrag.rewards.settings import RewardSettings
from reasonrag.training.settings import TrainSettings


class RolloutSettings(Section):
    """How trajectories are made.

    With `top_p` below 1 they follow another law than the trainer's log-probabilities, which nothing can correct:
    `importance` has to be off then.
    """

    group_size: Annotated[int, Field(ge=2, description="trajectories of each question: G"), Flag("--group-size")] = 8
    questions_per_step: Annotated[
        int, Field(ge=1, description="questions of one batch of rollouts"), Flag("--questions-per-step")
    ] = 16
    minibatches: Annotated[int, Field(ge=1, description="optimizer steps that use one batch of rollouts")] = 1
    temperature: Annotated[float, Field(gt=0, le=5, description="of sampling")] = 1.0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="nucleus of sampling: share of the probability that is kept")
    ] = 1.0
    max_tokens: Annotated[int, Field(ge=1, description="tokens of one completion")] = 512
    max_trajectory_tokens: Annotated[
        int | None, Field(ge=8, description="tokens of prompt and turn; a longer trajectory counts as truncated")
    ] = None
    engine: Annotated[
        Literal["auto", "generate", "continuous", "vllm-server"],
        Field(
            description="generate: transformers on the trainer's own weights; continuous: its continuous batching; "
            "vllm-server: a server that is sent the weights before each batch; auto: continuous "
            "on a GPU where the weights have 16 bits, else generate"
        ),
        EXECUTION,
    ] = "auto"
    url: Annotated[
        str | None,
        Field(description="a vLLM server that is sent the weights before each batch, such as http://127.0.0.1:8000/v1"),
        Flag("--rollout-url"),
        EXECUTION,
    ] = None
    served_model: Annotated[
        str | None, Field(description="the policy's name at that server; the model's own if not given"), EXECUTION
    ] = None
    batch_size: Annotated[int, Field(ge=1, description="rows at once, of an engine in this process"), EXECUTION] = 64
    concurrency: Annotated[int, Field(ge=1, description="requests in flight, of a server"), EXECUTION] = 256


class SamplingSettings(Section):
    """DAPO's dynamic sampling: groups in which all rewards are equal are dropped and refilled (arXiv:2503.14476)."""

    dynamic: Annotated[
        bool,
        Field(description="drop groups whose rewards are all equal, and draw other questions"),
        Flag("--dynamic-sampling/--no-dynamic-sampling"),
    ] = False
    max_rounds: Annotated[int, Field(ge=1, description="rounds of refilling, for one batch")] = 3


class OutageSettings(Section):
    """What happens where rewards are missing: a judge's failure never becomes a reward."""

    max_unscored: Annotated[
        float, Field(ge=0, le=1, description="share of a batch that may be without a reward"), EXECUTION
    ] = 0.25
    retries: Annotated[
        int, Field(ge=0, description="attempts at the missing rewards before the training stops"), EXECUTION
    ] = 3
    wait_s: Annotated[
        float,
        Field(ge=0, description="seconds before the first retry; twice as many before each further one"),
        EXECUTION,
    ] = 5.0


class GuardSettings(Section):
    """When a training that collapses is stopped, with its state and its best policy kept. 0 switches a guard off."""

    window: Annotated[int, Field(ge=1, description="optimizer steps that are averaged"), EXECUTION] = 10
    format_rate_drop: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="stop when the share of well-formed trajectories is this far below the best window's; 0: never",
        ),
        EXECUTION,
    ] = 0.4
    min_entropy: Annotated[
        float, Field(ge=0, description="stop below this entropy of the policy, in nats a token; 0: never"), EXECUTION
    ] = 0.0
    max_length_growth: Annotated[
        float,
        Field(ge=0, description="stop when trajectories are this many times as long as in the first window; 0: never"),
        EXECUTION,
    ] = 4.0


class ValidationSettings(Section):
    """Held-out questions that choose the best policy, greedy unless a temperature is given."""

    data: Annotated[
        str | None, Field(description="questions, as --dataset; the same data set's dev split if not given"), EXECUTION
    ] = None
    split: Annotated[str | None, Field(description="split of a named data set: train, dev or test"), EXECUTION] = None
    limit: Annotated[int | None, Field(ge=1, description="a seeded sample of this many questions"), EXECUTION] = 200
    steps: Annotated[int, Field(ge=0, description="optimizer steps between two looks; 0 looks never"), EXECUTION] = 20
    temperature: Annotated[float, Field(ge=0, le=5, description="of sampling; 0 is greedy"), EXECUTION] = 0.0
    metric: Annotated[
        Literal["em", "f1", "acc", "reward"],
        Field(description="what chooses the best policy; reward: the training's own"),
        EXECUTION,
    ] = "em"


class RLSettings(TrainSettings):
    """Group-relative policy optimisation on rollouts with retrieval (GRPO, DAPO)."""

    seed: Annotated[int, Field(description="of questions, rollouts and adapters"), Flag("--seed")] = 0
    data: Annotated[
        str | None,
        Field(description="questions: a known data set (hotpotqa, ...), demo, or a file"),
        Flag("--dataset"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="the policy to train: a folder or a Hub id; demo:FORMAT is a shipped one"),
        Flag("--model"),
        EXECUTION,
    ] = None
    split: Annotated[
        str | None, Field(description="split of a named data set: train, dev or test"), Flag("--split"), EXECUTION
    ] = None
    world_seed: Annotated[int, Field(description="which demo world: its seed"), Flag("--world-seed"), EXECUTION] = 0
    retrieval: RetrievalConfig = RetrievalConfig()
    format: FormatConfig = FormatConfig(name="search_r1", max_steps=5)
    judge: JudgeConfig = JudgeConfig()
    reward: RewardSettings = RewardSettings()
    plans: Annotated[
        str | None,
        Field(description="reference plans for search-p1: the file that `rl plan` writes"),
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
        Field(description="how the loss is averaged over tokens, as TRL names it"),
        Flag("--loss-type"),
    ] = "dapo"
    beta: Annotated[
        float, Field(ge=0, description="weight of the KL penalty; 0 loads no reference model"), Flag("--beta")
    ] = 0.0
    epsilon: Annotated[float, Field(gt=0, description="how far a ratio of probabilities may leave 1")] = 0.2
    epsilon_high: Annotated[
        float | None, Field(gt=0, description="how far it may rise above 1 (clip-higher); as epsilon if not given")
    ] = None
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Field(
            description="what advantages are divided by: the standard deviation in the group, in the batch, or nothing"
        ),
    ] = "group"
    mask_truncated: Annotated[bool, Field(description="trajectories cut off by a token limit teach nothing")] = True
    importance: Annotated[
        Literal["auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Field(description="correction where engine and trainer differ; auto: token_truncate with a server, else off"),
    ] = "auto"
    importance_max: Annotated[
        float, Field(gt=1, description="the ratio of probabilities at which the correction cuts")
    ] = 2.0
    max_steps: Annotated[int, Field(ge=1, description="optimizer steps"), Flag("--max-steps")] = 200
    per_device_train_batch_size: Annotated[
        int, Field(ge=1, description="trajectories of one forward pass"), Flag("--batch-size")
    ] = 8
    gradient_accumulation_steps: Annotated[int, Field(ge=1, description="follows from the batch; not to be set")] = 1
    lr_scheduler_type: Annotated[str, Field(description="schedule of the learning rate, as transformers names it")] = (
        "constant"
    )
    logging_steps: Annotated[
        int, Field(ge=1, description="optimizer steps between two lines of figures"), EXECUTION
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
            raise ValueError("rollout.top_p below 1 samples from another law than the trainer's; set importance to off")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RLSettings:
        if self.judge.model is not None and self.judge.spec is None:
            raise ValueError("a judge's model is named, and no judge; add --judge with its server, or leave it out")
        return self

    def accumulation(self, processes: int) -> int:
        """Forward passes of one optimizer step on each of some processes.

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

    def search(self) -> Config:
        """The same as the other commands' configuration, for the parts that they share."""
        return Config.model_construct(
            seed=self.seed,
            questions=QuestionsConfig(
                dataset=self.data, split=self.split, limit=self.limit, world_seed=self.world_seed
            ),
            retrieval=self.retrieval,
            policy=ModelConfig(
                temperature=self.rollout.temperature, top_p=self.rollout.top_p, max_tokens=self.rollout.max_tokens
            ),
            judge=self.judge,
            format=self.format,
        )


def load_rl_settings(
    presets: Mapping[str, Tree],
    *,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RLSettings:
    """The resolved settings. The policy's folder brings the format and prompts that it knows, below what is asked for.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a contradiction.
    """
    asked = gather(presets, preset=preset, file=file, overrides=overrides)
    model = str(asked.get("model") or "")
    carried = carried_settings(model if model.partition(":")[0] == "demo" else f"hf:{model}") if model else {}
    tokens = carried.pop("policy", {}).get("max_tokens")
    tree: Tree = {**carried, **({"rollout": {"max_tokens": tokens}} if tokens else {})}
    merge(tree, asked)
    return validate(RLSettings, tree)
