"""A plain function as a reward: TRL's convention for a batch, or one trajectory to one number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.rewards.base import NO_REWARD, BatchReward, Components, Read, RewardParts, Score, trajectory_text

# What a function in TRL's convention can ask for by name: each but `step` is a list with one entry per trajectory.
COLUMNS = (
    "prompts",
    "completions",
    "question",
    "golden_answers",
    "answer",
    "id",
    "dataset",
    "metadata",
    "trajectories",
    "step",
)


class FunctionReward(BatchReward):
    """Scores by a function, sync or async, in one of two forms.

    `reward(completions, **kwargs) -> list[float | None]`, as in TRL: it has a parameter `completions` or takes
    `**kwargs`, and is called with keyword arguments (`COLUMNS`) once for the trajectories of one question.
    `reward(trajectory) -> float | None`: it has one parameter, and is called once per `Trajectory`.

    None, NaN, a value that is not a number and an exception give no score: the trajectory is set aside, counted under
    `no_reward`, `not_finite`, `not_a_number` or `bug:TYPE`. A sync function blocks the rollouts of other questions
    while it runs, so one that waits for a network should be async.
    """

    def __init__(self, function: Callable[..., Any], name: str, parts: RewardParts) -> None:
        """Check the function's signature.

        Args:
            function: in one of the two forms.
            name: for messages, such as `my_rewards:brevity`.
            parts: gives the format that reads the trajectories.

        Raises:
            ConfigError: the function has neither form, or requires a column that does not exist.
        """
        super().__init__(parts)
        self.function = function
        self.name = name
        self.columns = trl_columns(function, name)

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        if self.columns is None or not batch:
            return await super()._values(batch, step)
        available = _columns(batch, step)
        rewards = self.function(**{column: available[column] for column in self.columns})
        if inspect.isawaitable(rewards):
            rewards = await rewards
        try:
            rewards = list(rewards)
        except TypeError:
            raise ConfigError(
                f"reward {self.name} returned {type(rewards).__name__}; return a list with one number per completion"
            ) from None
        if len(rewards) != len(batch):
            raise ConfigError(
                f"reward {self.name} returned {len(rewards)} rewards for {len(batch)} completions, so they cannot be "
                "matched; return one per completion, and None for a completion without a reward"
            )
        return [as_score(reward, read.parts) for reward, read in zip(rewards, batch, strict=True)]

    async def _value(self, read: Read, step: int) -> Score:
        reward = self.function(read.trajectory)
        if inspect.isawaitable(reward):
            reward = await reward
        return as_score(reward, read.parts)


def trl_columns(function: Callable[..., Any], name: str) -> tuple[str, ...] | None:
    """Return the columns to call a function with, in TRL's convention; None for a function of one trajectory.

    Raises:
        ConfigError: the function has neither form, or requires a column that does not exist.

    >>> trl_columns(lambda completions, golden_answers, **kwargs: [0.0], "mine")[:4]
    ('prompts', 'completions', 'question', 'golden_answers')
    >>> trl_columns(lambda completions, answer: [0.0], "mine")
    ('completions', 'answer')
    >>> trl_columns(lambda trajectory: 0.0, "mine") is None
    True
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {name} is no function that can be called ({error}); name a function or a class"
        ) from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [parameter for parameter in named if parameter.default is parameter.empty]
    if takes_any or any(parameter.name == "completions" for parameter in named):
        unknown = [p.name for p in required if p.name not in COLUMNS or p.kind is p.POSITIONAL_ONLY]
        if unknown:
            raise ConfigError(
                f"reward {name} requires {', '.join(unknown)}, which reasonrag cannot give it; a reward function is "
                f"called with these keyword arguments: {', '.join(COLUMNS)}"
            )
        names = {parameter.name for parameter in named}
        return tuple(column for column in COLUMNS if takes_any or column in names)
    if len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return None
    raise ConfigError(
        f"reward {name} takes ({', '.join(str(p) for p in parameters)}); write a function "
        "`(completions, **kwargs) -> list[float]` as in TRL, a function `(trajectory) -> float`, or a class (Reward)"
    )


def as_score(reward: object, parts: Components) -> Score:
    """Return what a function gave for one trajectory as a score, without a value if it is None or not a number.

    >>> as_score(True, {}).value, as_score(None, {}).cause, as_score("high", {}).cause
    (1.0, 'no_reward', 'not_a_number')
    """
    if reward is None:
        return Score(None, parts, NO_REWARD)
    try:
        return Score(float(reward), parts)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return Score(None, parts, "not_a_number")


def _columns(batch: Sequence[Read], step: int) -> dict[str, Any]:
    """Return the arguments of a function in TRL's convention; prompts and completions are lists of messages."""
    columns: dict[str, Any] = {column: [] for column in COLUMNS}
    for read in batch:
        trajectory, question = read.trajectory, read.trajectory.question
        messages = trajectory.steps[0].prompt.messages if trajectory.steps else ()
        row = {
            "prompts": [{"role": message.role, "content": message.content} for message in messages],
            "completions": [{"role": "assistant", "content": trajectory_text(trajectory)}],
            "question": question.question,
            "golden_answers": list(question.golden_answers),
            # As TRL's examples call the reference. The policy's own answer is `trajectory.answer`.
            "answer": question.golden_answers[0] if question.golden_answers else "",
            "id": question.id,
            "dataset": question.dataset,
            "metadata": question.metadata,
            "trajectories": trajectory,
        }
        for column, value in row.items():
            columns[column].append(value)
    columns["step"] = step
    return columns
