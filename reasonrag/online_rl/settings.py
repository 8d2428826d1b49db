"""Settings of online training, named as in TRL if TRL has them; `trainer.*` sets its other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from reasonrag.core.config import (
    DATASET,
    EXCLUDE,
    LIMIT,
    UNREADABLE,
    Config,
    FormatConfig,
    JudgeConfig,
    ModelConfig,
    OutcomeConfig,
    QuestionsConfig,
    RetrievalConfig,
    RunConfig,
    StallConfig,
    carried_settings,
)
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress
from reasonrag.core.settings import Section, Tree, execution, gather, merge, read_yaml, setting, validate
from reasonrag.rewards.base import RewardSettings
from reasonrag.training.settings import TrainSettings


class RolloutSettings(Section):
    """How trajectories are made.

    With `top_p` below 1 they follow another distribution than the
    trainer's log-probabilities, which `importance` cannot correct.
    """

    group_size: int = setting(
        8, "trajectories per question: G of GRPO; 1 is for ppo and reinforce++ only", "--group-size", ge=1, le=10_000
    )
    questions_per_step: int = setting(16, "questions per batch of rollouts", "--questions-per-step", ge=1)
    minibatches: int = setting(1, "optimizer steps of a training step: parts of its batch of rollouts", ge=1)
    temperature: float = setting(1.0, "sampling temperature of the rollouts", gt=0, le=5)
    top_p: float = setting(1.0, "nucleus sampling: probability mass that is kept", gt=0, le=1)
    max_tokens: int = setting(512, "maximum tokens of one completion", ge=1)
    max_trajectory_tokens: int | None = setting(
        None, "maximum tokens of a training row, prompt included; a longer one counts as truncated", ge=8
    )
    url: str | None = execution(
        None,
        "URL of a vLLM server for rollouts, which gets the weights before each batch (default: transformers in this "
        "process, with the trainer's own weights)",
        "--rollout-url",
    )
    sleep: bool = execution(
        False, "the server shares the trainer's card: it gives its memory back while the policy trains (with url)"
    )
    ahead: bool = setting(
        False,
        "make the rollouts of the next batch while the policy trains on this one, with weights one batch older (with "
        "url; see importance)",
        "--rollouts-ahead/--no-rollouts-ahead",
    )
    batch_size: int = execution(64, "trajectories per batch of an engine in this process", ge=1)


class SamplingSettings(Section):
    """DAPO's dynamic sampling: questions are drawn until no group has equal rewards (arXiv:2503.14476, sec. 3.2)."""

    dynamic: bool = setting(
        False,
        "drop groups with equal rewards, and draw other questions until the batch is full (DAPO)",
        "--dynamic-sampling/--no-dynamic-sampling",
    )


class PPOSettings(Section):
    """Advantages of tokens, and PPO's value model. The defaults are verl's."""

    lam: float = setting(1.0, "lambda of GAE; 1 uses whole returns, 0 the next value alone", ge=0, le=1)
    learning_rate: float = setting(1e-5, "peak learning rate of the value model", gt=0, le=1)
    warmup_ratio: float = setting(0.0, "share of the steps during which that learning rate rises", ge=0, lt=1)


class PlanSettings(Section):
    """`rl plan`: Search-P1's reference plans, from K correct trajectories (sec. 3.2.1, Eq. 5)."""

    candidates: int = setting(4, "trajectories per question: K of Search-P1, Eq. 5", "--candidates", ge=1, le=1000)
    show_answer: bool = setting(
        False,
        "where no trajectory helps, let the planner plan from the golden answer (Search-P1, appendix D.2)",
        "--show-answer/--no-show-answer",
    )


class OutageSettings(Section):
    """What happens if rewards are missing: a failure of the judge never becomes a reward."""

    max_unscored: float = execution(0.25, "maximum share of a batch without a reward", ge=0, le=1)


class GuardSettings(Section):
    """When a run that cannot learn, or collapses, is stopped; its state and best policy are kept."""

    max_unreadable: float = execution(0.9, UNREADABLE, "--max-unreadable", ge=0, le=1)
    format_rate_drop: float = execution(
        0.4,
        "stop if the share of well-formed trajectories is this far below that of the best window; 0 disables",
        ge=0,
        le=1,
    )
    max_length_growth: float = execution(
        4.0, "stop if trajectories are this many times as long as in the first window; 0 disables", ge=0
    )


class ValidationSettings(Section):
    """Held-out questions that choose the best policy. Other ones would give values that cannot be compared."""

    data: str | None = setting(
        None, "validation questions, as for --dataset (default: the dev split of the training questions)"
    )
    limit: int | None = setting(200, "use a random sample of this many validation questions of each data set", ge=1)
    steps: int = execution(20, "training steps between two validations; 0 disables", ge=0)
    temperature: float = setting(0.0, "sampling temperature; 0 is greedy decoding", ge=0, le=5)
    metric: Literal["em", "f1", "acc", "reward"] = setting(
        "em", "metric that chooses the best policy; reward: the training reward"
    )


class RLSettings(TrainSettings):
    """Policy optimisation on rollouts with retrieval (GRPO, DAPO, PPO, RLOO, REINFORCE++)."""

    log_every = 1

    data: str | None = execution(None, DATASET, "--dataset")
    split: str | None = execution(None, "split of a known data set: train, dev or test", "--split")
    limit: int | None = setting(None, LIMIT, "--limit", ge=1)
    exclude: tuple[str, ...] = execution((), EXCLUDE, "--exclude")
    world_seed: int = execution(0, "seed of the demo world", "--world-seed")
    retrieval: RetrievalConfig = RetrievalConfig()
    format: FormatConfig = FormatConfig(name="search_r1", max_steps=5)
    judge: JudgeConfig = JudgeConfig()
    reward: RewardSettings = RewardSettings()
    outcome: OutcomeConfig = OutcomeConfig(name="")
    plans: str | None = execution(
        None, "reference plans for the reward search-p1: a file that `rl plan` wrote", "--plans"
    )
    rollout: RolloutSettings = RolloutSettings()
    sampling: SamplingSettings = SamplingSettings()
    outage: OutageSettings = OutageSettings()
    guards: GuardSettings = GuardSettings()
    validation: ValidationSettings = ValidationSettings()
    run: StallConfig = StallConfig()

    algorithm: Literal["grpo", "ppo", "rloo", "reinforce++"] = setting(
        "grpo",
        "baseline of a reward. grpo: the mean of the group, divided by its deviation; rloo: the mean of the "
        "others in the group; ppo: the prediction of a value model at each token (GAE); reinforce++: the "
        "mean of the batch. The last two make the KL penalty part of the reward",
        "--algorithm",
    )
    ppo: PPOSettings = PPOSettings()
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = setting(
        "dapo",
        "loss function, by its name in TRL. The choices differ in how the loss is averaged over tokens",
        "--loss-type",
    )
    beta: float = setting(
        0.0,
        "KL weight: how strongly the policy is held to the reference model. With 0, no reference model is loaded",
        "--beta",
        ge=0,
        le=1000,
    )
    epsilon: float = setting(0.2, "clipping range of the probability ratio around 1", gt=0)
    epsilon_high: float | None = setting(
        None, "upper clipping range of the probability ratio, clip-higher (default: epsilon)", gt=0
    )
    credit: Literal["trajectory", "step"] = setting(
        "trajectory",
        "advantage of a step in a format that asks with a fresh prompt at each step. trajectory: that of its "
        "trajectory; step: the mean over the trajectories of the group that take the same steps up to there",
        "--credit",
    )
    mask_truncated: bool = setting(True, "exclude trajectories that a token limit cut off from the loss")
    importance: Literal["auto", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = setting(
        "auto",
        "importance sampling correction between engine and trainer; auto: token_truncate with a server if top_p is 1",
    )
    max_steps: int = setting(200, "training steps, each on a batch of rollouts", "--max-steps", ge=1)
    per_device_train_batch_size: int = setting(
        8, "training examples per forward pass on each device", "--batch-size", ge=1
    )
    lr_scheduler_type: str = setting("constant", "learning rate schedule, by its name in transformers")
    save_steps: int = execution(20, "training steps between checkpoints", "--save-steps", ge=1)

    @model_validator(mode="after")
    def _no_contradiction(self) -> RLSettings:
        rollout = self.rollout
        if (rollout.sleep or rollout.ahead) and (rollout.url is None or (rollout.sleep and rollout.ahead)):
            raise ValueError(
                "rollout.ahead needs a server that works beside the trainer, and rollout.sleep one that does not; give "
                "--rollout-url and one of them"
            )
        if rollout.group_size == 1 and (not self.by_token or self.sampling.dynamic):
            comparing = "sampling.dynamic" if self.by_token else f"algorithm {self.algorithm}"
            raise ValueError(
                f"{comparing} compares the trajectories of a question, and rollout.group_size is 1; take 2 or more, or "
                "algorithm ppo or reinforce++ without dynamic sampling"
            )
        if self.by_token and self.credit == "step":
            raise ValueError(
                f"credit step is the mean advantage of trajectories with the same steps, and algorithm "
                f"{self.algorithm} gives each token its own; leave credit out"
            )
        return self

    @property
    def by_token(self) -> bool:
        """Whether each token has an advantage, instead of each trajectory."""
        return self.algorithm in ("ppo", "reinforce++")

    @property
    def correction(self) -> str | None:
        """How the loss corrects for rollouts from other weights or numerics than the trainer's; None for not."""
        if self.importance == "auto":
            # With a top_p below 1 the ratio would be that of two different distributions.
            return "token_truncate" if self.rollout.url and self.rollout.top_p == 1 else None
        return None if self.importance == "off" else self.importance

    def accumulation(self, processes: int) -> int:
        """Return the forward passes of one optimizer step on each process.

        Raises:
            ConfigError: the batch cannot be divided.
        """
        rollout = self.rollout
        rows = rollout.questions_per_step * rollout.group_size
        share = rollout.minibatches * processes * self.per_device_train_batch_size
        # A process holds whole groups.
        if rollout.questions_per_step % processes or rows % share:
            raise ConfigError(
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
                dataset=self.data, **self.model_dump(include={"split", "limit", "exclude", "world_seed"})
            ),
            retrieval=self.retrieval,
            policy=ModelConfig(
                spec=self.model and str(ModelAddress.of_model(self.model)),
                **self.model_dump(include={"revision", "chat_template"}),
                **self.rollout.model_dump(include={"temperature", "top_p", "max_tokens"}),
            ),
            judge=self.judge,
            format=self.format,
            run=RunConfig(max_unreadable=self.guards.max_unreadable, stall_s=self.run.stall_s),
        )


@cache
def rl_presets() -> dict[str, Tree]:
    """Return the presets of `rl train` by name; one that names a `base` is laid over it."""
    presets: dict[str, Tree] = {}
    for name, changes in read_yaml(Path(__file__).with_name("presets.yaml")).items():
        presets[name] = {}
        # Section by section, so that a preset names only what differs from its base.
        for tree in (presets.get(changes.pop("base", ""), {}), changes):
            merge(presets[name], tree)
    return presets


def load_rl_settings(
    *, preset: str | None = None, file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> RLSettings:
    """Resolve the settings. The format and prompts saved with the policy are defaults, which `overrides` replace.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a contradiction.
    """
    explicit = gather(rl_presets(), preset=preset, file=file, overrides=overrides)
    tree = carried_settings(ModelAddress.of_model(str(explicit.get("model") or "")))
    # The policy was trained to answer within this limit; here it is a setting of the rollouts.
    if tokens := tree.pop("policy", {}).get("max_tokens"):
        tree["rollout"] = {"max_tokens": tokens}
    merge(tree, explicit)
    return validate(RLSettings, tree)
