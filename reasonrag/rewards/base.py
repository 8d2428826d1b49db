"""Rewards score finished trajectories and explain each score; a failure is never a score.

`Reward` is the protocol. `BatchReward` is the base class of the shipped rewards: one trajectory at a
time, with the components that all rewards report. `FunctionReward` takes a plain function in TRL's
convention. The settings of the rewards stand at the end: a section each, with the paper's values as
defaults and its ablations as switches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import structlog
from pydantic import Field

from reasonrag.core.config import PRM
from reasonrag.core.errors import BackendError, ConfigError, InputError, Interrupted
from reasonrag.core.plugins import place_of
from reasonrag.core.settings import Section, execution, setting
from reasonrag.core.text import cover_match, exact_match, excerpt, token_f1
from reasonrag.core.types import Grade, Search, Trajectory
from reasonrag.formats.base import Format, Reading
from reasonrag.llm.base import LLM, StepScorer
from reasonrag.rollout import gather_all

if TYPE_CHECKING:
    from reasonrag.rewards.judge import JudgeService, ReferencePlan

log = structlog.get_logger()

_logged: set[tuple[str, str]] = set()  # bugs, with the line of the code of others

Components = dict[str, float | None]

# The cause of a score that a reward function leaves out on
# purpose. Scoring the trajectory again changes nothing.
NO_REWARD = "no_reward"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one trajectory.

    `value` is None if it is unknown, for example after a judge's failure:
    the trajectory is then left out, and `cause` names the reason. `parts`
    are all components by name, which explain the value; an unknown
    component is None. `steps` are rewards of its steps, in order, each
    credited to its step alone; () without any, None for a step without one.
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: str = ""
    steps: tuple[float | None, ...] = ()


class Reward(Protocol):
    """Scores trajectories of one format. Safe to call from many tasks at once.

    A class may declare the parts of `RewardParts` that it uses as
    `needs`: a set of their names, or a static method that returns
    the set for `RewardSettings` and a format. Only these are opened.
    Without a declaration all parts are given that the settings name.
    """

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """Return `[B]` scores of trajectories that have ended.

        Args:
            trajectories: such as the group of one question.
            step: optimizer steps taken so far, for rewards that change during training.

        Never raises if a judge or a model fails: the score of that trajectory then has no value.
        """

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Receive all scores of a training step, once per step: for schedules that depend on them."""
        return

    def state(self) -> dict[str, Any]:
        """Return what has to survive a restart, as JSON values; `{}` for a stateless reward."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the reward to what `state()` returned in the run that is resumed."""
        return


class Outcome(Protocol):
    """Grades answers. Safe to call from many tasks at once."""

    async def grade(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        """Return `[B]` grades of trajectories that have ended, in order. A missing answer is worth 0.

        A verdict that is missing is a grade without a value, never 0.
        """


class Encoder(Protocol):
    """Turns texts into vectors. Their cosine is the texts' similarity. Safe to call from many tasks at once."""

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][d]`, one vector per text; only vectors of the same call can be compared."""


@dataclass(frozen=True, slots=True)
class RewardParts:
    """What rewards are built from. A reward names the parts that it needs in `needs`.

    `judge` decides what rules cannot; `policy` is the model being trained,
    which HiPRAG asks again without a search; `encoder` compares queries;
    `scorer` values steps; `outcome` grades answers, instead of the reward's
    own metric; `plans` are Search-P1's, by data set and question id;
    `decode` turns sampled ids into text, if their log-probabilities are known.
    """

    format: Format
    judge: JudgeService | None = None
    policy: LLM | None = None
    encoder: Encoder | None = None
    scorer: StepScorer | None = None
    outcome: Outcome | None = None
    plans: Mapping[tuple[str, str], ReferencePlan] = field(default_factory=dict)
    decode: Callable[[Sequence[int]], str] | None = None


# What to do if a part that a reward needs is missing.
MISSING = {
    "judge": "a judge; add --judge with a model that decides",
    "plans": "reference plans; add --plans with a file of `rl plan`, or set reward.search_p1.reference_track to false",
    "policy": "the policy, to ask what it knows without a search; set reward.hiprag.over_search to false",
    "encoder": "an encoder that compares queries; name one in reward.when_to_search.encoder",
    "scorer": "a process reward model; add --prm",
    "decode": "the log-probabilities of the policy's tokens, which only `rl train` knows; set "
    "reward.outcome.search_confidence to 0",
}


def queries(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the queries that the retriever was sent, in order."""
    return tuple(step.action.query for step in trajectory.steps if isinstance(step.action, Search))


def trajectory_text(trajectory: Trajectory) -> str:
    """Return the whole trajectory as text, with the passages: its growing turn, or the texts of its steps."""
    if not trajectory.steps:
        return ""
    last = trajectory.steps[-1]
    # A growing turn holds everything before it.
    if last.prompt.prefix or len(trajectory.steps) == 1:
        return last.prompt.prefix + last.completion.text
    texts = []
    for step, following in zip_longest(trajectory.steps, trajectory.steps[1:]):
        texts.append(step.completion.text)
        if isinstance(step.action, Search) and following and following.prompt.messages[-1].role == "tool":
            texts.append(f"<tool_response>\n{following.prompt.messages[-1].content}\n</tool_response>")
    return "\n".join(texts)


def finite(score: Score) -> Score:
    """Return the score, or one without a value if a number in it is NaN or infinite.

    >>> finite(Score(float("nan"), {"em": 1.0}))
    Score(value=None, parts={'em': 1.0}, cause='not_finite', steps=())
    """
    numbers = [score.value, *score.parts.values(), *score.steps]
    if all(number is None or math.isfinite(number) for number in numbers):
        return score
    known = {name: part for name, part in score.parts.items() if part is not None and math.isfinite(part)}
    return Score(None, {**dict.fromkeys(score.parts), **known}, "not_finite")


@dataclass(frozen=True, slots=True)
class Read:
    """A finished trajectory as its format reads it; a reward adds its components to `parts`."""

    trajectory: Trajectory
    reading: Reading
    parts: Components

    @classmethod
    def of(cls, trajectory: Trajectory, reading: Reading) -> Read:
        """Return the trajectory with the components of every score.

        They are `em`, `f1`, `cem` in [0, 1], `rc` (retrievals), and `well_formed`, 0 or 1. Without an
        answer em, f1 and cem are 0 and not unknown: the trajectory has ended.
        """
        answer, golden = trajectory.answer, trajectory.question.golden_answers
        scores = {"em": exact_match(answer, golden), "f1": token_f1(answer, golden), "cem": cover_match(answer, golden)}
        counts = {"rc": float(len(queries(trajectory))), "well_formed": float(reading.well_formed)}
        return cls(trajectory, reading, {**scores, **counts})

    @property
    def is_known(self) -> bool:
        """Whether no outcome was named, or it has a value."""
        return self.parts.get("grade", 0.0) is not None

    def answer(self, metric: str) -> float:
        """Return what the answer is worth: by the outcome that was named, else by the reward's own metric."""
        return self.parts.get("grade", self.parts.get(metric)) or 0.0


class BatchReward(Reward):
    """A stateless reward. A subclass implements `_value` for one trajectory, or `_values` for a batch."""

    def __init__(self, settings: RewardSettings, parts: RewardParts) -> None:
        self.settings = settings
        self.parts: Any = parts  # has the parts in `needs`

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        """Return `[B]` scores, in order. A backend or a reward that fails gives a score without a value.

        Raises:
            Interrupted: the run is shutting down, and a new call would be needed.
            InputError: no trajectory can be scored, for example
                without a prompt text or with a full disk.
        """
        # `[B]` in the order of the trajectories, as their scores.
        batch = [Read.of(trajectory, self.parts.format.read(trajectory)) for trajectory in trajectories]
        grades = await grades_of(self.parts.outcome, trajectories) if self.parts.outcome else []
        for read, grade in zip(batch, grades, strict=False):
            read.parts["grade"] = grade.value
        known = [read for read in batch if read.is_known]
        try:
            scores = await self._values(known, step)
        except Exception as error:
            cause = cause_of(error)
            scores = [Score(None, read.parts, cause) for read in known]
        scored, causes = map(finite, scores), (grade.reason for grade in grades if grade.value is None)
        return [next(scored) if read.is_known else Score(None, read.parts, next(causes)) for read in batch]

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        """Score a batch concurrently; a trajectory that fails does not affect the others."""
        return await gather_all(self._settled(read, self._value(read, step)) for read in batch)

    async def _value(self, read: Read, step: int) -> float | Score:
        """Score one trajectory and put its components into `read.parts`."""
        raise NotImplementedError

    async def _settled(self, read: Read, scoring: Awaitable[float | Score]) -> Score:
        try:
            scored = await scoring
        except Exception as error:
            return Score(None, read.parts, cause_of(error))
        return scored if isinstance(scored, Score) else Score(scored, read.parts)


async def grades_of(outcome: Outcome, trajectories: Sequence[Trajectory]) -> list[Grade]:
    """Return `[B]` grades; if the outcome fails, they have no value, and its cause as their reason."""
    try:
        return await outcome.grade(trajectories)
    except Exception as error:
        return [Grade(None, cause_of(error))] * len(trajectories)


def cause_of(error: Exception) -> str:
    """Return the short name under which a failure is counted. A bug is logged as well: nothing else would show it.

    Raises:
        Interrupted, InputError: the error itself, as every other trajectory would meet it.
    """
    if isinstance(error, (Interrupted, InputError)):
        raise error
    if isinstance(error, BackendError):  # a judge, policy or encoder that fails
        return error.cause
    cause, place = f"bug:{type(error).__name__}", place_of(error)
    if (cause, place) not in _logged:  # once, not for each trajectory
        _logged.add((cause, place))
        log.warning("a reward failed", error=excerpt(f"{type(error).__name__}: {error}"), place=place)
    return cause


# What a function in TRL's convention can ask for by name: a list with one
# entry per trajectory, and `step`. As TRL's examples call it, "answer" is
# the reference. The policy's own answer is in "predictions".
_COLUMNS_OF: dict[str, Callable[[Trajectory], Any]] = {
    "prompts": lambda trajectory: [asdict(text) for step in trajectory.steps[:1] for text in step.prompt.messages],
    "completions": lambda trajectory: [{"role": "assistant", "content": trajectory_text(trajectory)}],
    "question": lambda trajectory: trajectory.question.question,
    "golden_answers": lambda trajectory: list(trajectory.question.golden_answers),
    "predictions": lambda trajectory: trajectory.answer,
    "answer": lambda trajectory: next(iter(trajectory.question.golden_answers), ""),
    "id": lambda trajectory: trajectory.question.id,
    "dataset": lambda trajectory: trajectory.question.dataset,
    "metadata": lambda trajectory: trajectory.question.metadata,
    "trajectories": lambda trajectory: trajectory,
}
COLUMNS = (*_COLUMNS_OF, "step")


async def call_function(
    function: Callable[..., Any], name: str, trajectories: Sequence[Trajectory], step: int = 0
) -> list[Any]:
    """Return `[B]` results of a function in TRL's convention; raise ConfigError if it returns another number."""
    columns = trl_columns(function, name)
    asked: dict[str, Any] = {"step": step} if "step" in columns else {}
    for column in _COLUMNS_OF.keys() & columns:
        asked[column] = [_COLUMNS_OF[column](trajectory) for trajectory in trajectories]
    result = function(**asked)
    result = await result if inspect.isawaitable(result) else result
    if isinstance(result, Mapping | Set | str):
        raise ConfigError(f"{name} returned a {type(result).__name__}; return a list, one value per completion")
    results = list(result)
    if len(results) != len(trajectories):
        raise ConfigError(
            f"{name} returned {len(results)} values for {len(trajectories)} completions, so they cannot be "
            "matched; return one per completion, and None for a completion without a value"
        )
    return results


class FunctionReward(BatchReward):
    """Scores by a function in TRL's convention, sync or async: `reward(completions, **kwargs) -> list[float | None]`.

    It is called once for the trajectories of one question, with the keyword arguments (`COLUMNS`) that it
    names, or all of them if it takes `**kwargs`.

    None, NaN, a value that is not a number and an exception give no score:
    the trajectory is set aside, counted under `no_reward`, `not_finite`,
    `not_a_number` or `bug:TYPE`. A sync function blocks the rollouts of other
    questions while it runs, so one that waits for a network should be async.

    Args:
        function: as above (`trl_columns`).
        name: for messages, such as `my_rewards:brevity`.
        parts: gives the format that reads the trajectories.
    """

    def __init__(self, function: Callable[..., Any], name: str, parts: RewardParts) -> None:
        super().__init__(RewardSettings(), parts)
        self.function = function
        self.name = name

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        rewards = await call_function(self.function, self.name, [read.trajectory for read in batch], step)
        return [as_score(reward, read.parts) for reward, read in zip(rewards, batch, strict=True)]


def trl_columns(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the columns to call a function with, in TRL's convention.

    Raises:
        ConfigError: it is not a function, or requires a column that does not exist.

    >>> trl_columns(lambda completions, golden_answers, **kwargs: [0.0], "mine")[:4]
    ('prompts', 'completions', 'question', 'golden_answers')
    >>> trl_columns(lambda completions, answer: [0.0], "mine")
    ('completions', 'answer')
    """
    if not callable(function):
        raise ConfigError(f"reward {name} cannot be called; name a function or a class")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    for parameter in parameters:
        if parameter.name in names and parameter.default is parameter.empty and parameter.name not in COLUMNS:
            raise ConfigError(
                f"reward {name} requires {parameter.name}, which reasonrag cannot give it; a reward function is "
                f"called with these keyword arguments: {', '.join(COLUMNS)}"
            )
    # A function gets only the columns that it names, unless it takes any.
    return tuple(column for column in COLUMNS if takes_any or column in names)


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


class OutcomeSettings(Section):
    """The final answer, and optionally the form: the baseline for process rewards.

    Search-R1's release v0.3 (arXiv:2503.09516) has format_weight 0.2
    and answer_present 0.1: an exact match earns 1 if well-formed, else
    0.8; a wrong answer 0.2 if well-formed, else 0.1; no answer 0.
    """

    format_weight: float = setting(0.0, "weight of the format; the answer has the rest of 1", ge=0, le=1)
    answer_present: float = setting(
        0.0, "minimum reward of a trajectory that has any final answer; at most format_weight", ge=0, le=1
    )
    search_confidence: float = setting(
        0.0,
        "beta of beta-GRPO (arXiv:2505.17281): an answer counts as wrong if the policy gave some token of its searches "
        "a lower probability; 0 disables",
        ge=0,
        le=1,
    )


class SPRESettings(Section):
    """Shortest Path Reward Estimation, Eq. 1 (arXiv:2505.14069), of a finished trajectory."""

    alpha: float = setting(0.9, "decay of the reward per step", gt=0, le=1)


class PRMRewardSettings(Section):
    """The outcome of the answer (F1), and the values that a process reward model gives the steps."""

    model: str | None = execution(None, PRM, "--prm")
    weight: float = setting(0.5, "weight of the values of steps in their advantages", ge=0)


class HiPRAGSettings(Section):
    """HiPRAG, Eq. 1 (arXiv:2510.07794): a bonus for steps that search when they must, and only then."""

    lambda_f: float = setting(0.2, "weight of the format", ge=0, le=1)
    lambda_p: float = setting(0.4, "maximum bonus; 0 needs no judge (the paper's Search-R1-step*)", ge=0)
    over_search: bool = setting(True, "detect searches for facts that the policy already knew")
    known_by: str | None = setting(
        None,
        "model that is asked what it knows without a search, such as the policy before training: demo:NAME, hf:MODEL "
        "or URL#MODEL (default: the policy as it is now, which may forget what it knew)",
    )
    under_search: bool = setting(True, "detect false steps without a search")


class SearchP1Settings(Section):
    """Search-P1, Eq. 4 to 8: a good plan, carried out, and partial credit for a wrong answer."""

    lambda_p: float = setting(0.3, "weight of the path", ge=0)
    lambda_a: float = setting(0.6, "weight of the outcome", ge=0)
    lambda_f: float = setting(0.1, "weight of the format", ge=0)
    self_track: bool = setting(True, "score how well the policy follows its own plan (Eq. 6)")
    reference_track: bool = setting(True, "score how much of the reference plan is covered (Eq. 7)")
    format: Literal["soft", "strict", "none"] = setting(
        "soft",
        "format reward. soft: 1 or 0.5, and an invalid trajectory earns 0; strict: a trajectory out of format earns 0; "
        "none: no format reward",
    )
    outcome: Literal["soft", "binary"] = setting(
        "soft", "soft: a wrong answer can earn part of the outcome (Eq. 8); binary: it cannot"
    )
    alpha: float = setting(0.8, "weight of a partly right answer; the reasoning has the rest of 1 (Eq. 8)", ge=0, le=1)


class WhenToSearchSettings(Section):
    """Learning when to search, Eq. 6 to 12: stage 1 rewards searching if an answer is wrong, stage 2 penalises it."""

    beta: float = setting(0.3, "reward of one retrieval (Eq. 10 and 11)", ge=0)
    rc_cap: int = setting(
        3,
        "maximum retrievals that count in Eq. 10 and 11. While beta * rc_cap is below 1, a wrong answer never earns as "
        "much as a right one of the same form",
        ge=0,
    )
    stages: Literal["both", "one", "two", "unified"] = setting(
        "both",
        "ablations: stay in stage one, begin with stage two, or have no stages and both terms of Eq. 10 and 11 at once "
        "(unified, Table 2; a wrong answer can then earn more than a right one)",
    )
    switch_step: Annotated[int, Field(ge=0)] | Literal["auto"] = setting(
        "auto", "training step at which stage 2 begins; auto: once retrievals per question stop rising"
    )
    encoder: str = setting(
        "lexical", "encoder that compares queries: lexical, or a sentence-transformers model (a Hub id or a folder)"
    )
    no_r_a: bool = setting(False, "ablation: ignore whether the answer is right (r_a is 0)")
    no_r_s: bool = setting(False, "ablation: ignore the similarity of queries (Eq. 9 is 0)")


class RewardSettings(Section):
    """The chosen reward, and the weights of each."""

    name: str = setting(
        "outcome",
        "reward function: outcome, spre, prm, hiprag, search-p1, when-to-search, or your own class or function as "
        "python:PACKAGE.MODULE:NAME",
        "--reward",
    )
    outcome: OutcomeSettings = OutcomeSettings()
    spre: SPRESettings = SPRESettings()
    prm: PRMRewardSettings = PRMRewardSettings()
    hiprag: HiPRAGSettings = HiPRAGSettings()
    search_p1: SearchP1Settings = SearchP1Settings()
    when_to_search: WhenToSearchSettings = WhenToSearchSettings()
