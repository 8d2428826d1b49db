"""Outcomes: what an answer is worth, in [0, 1], with a reason in words.

Trees, pairs, process labels, evaluation and rewards share them; token F1 is the default of trees. A rule
compares with the golden answers or the golden items, a judge reads a rubric, a reference or the golden
answers, and a function of yours may do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

from reasonrag.core.config import OutcomeConfig
from reasonrag.core.errors import ConfigError, DataError, JudgeError, LLMError
from reasonrag.core.plugins import import_plugin
from reasonrag.core.settings import nearest
from reasonrag.core.text import cover_match, exact_match, item_f1, items_of, quoted, token_f1, valid_unicode
from reasonrag.core.types import Grade, Question, Trajectory
from reasonrag.rewards.base import NO_REWARD, Outcome, call_function, trl_columns
from reasonrag.rewards.judge import JudgeService, answer_matches, answer_score
from reasonrag.rollout import gather_all


def _each(metric: Callable[..., float], predictions: list[str | None], golden_answers: list[list[str]]) -> list[float]:
    return list(map(metric, predictions, golden_answers))


def list_f1(trajectories: Sequence[Trajectory]) -> list[tuple[float, str]]:
    """Return F1 over the items of lists; without `items` golden answers are lists in words, and the best counts.

    >>> list_f1([Trajectory(Question("q", "Which films?", ("Jaws, Duel",)))])
    [(0.0, '0 of 2 items, 0 wrong')]
    """
    grades = []
    for trajectory in trajectories:
        lists: list[Any] = [[[item] for item in items_of(text)] for text in trajectory.question.golden_answers]
        items = [trajectory.question.items] if trajectory.question.items else lists
        grades.append(max(item_f1(trajectory.answer, each) for each in items or [[]]))
    return grades


# In TRL's convention. They may return pairs of a value and a reason.
RULES: Mapping[str, Callable[..., Any]] = {
    "f1": partial(_each, token_f1),
    "em": partial(_each, exact_match),
    "cover": partial(_each, cover_match),
    "list": list_f1,
}


@dataclass(frozen=True)
class FunctionOutcome:
    """Grades by a function in TRL's convention (`FunctionReward`), which may return pairs of a value and a reason.

    It is asked about answers alone: a missing one is worth 0. None is a grade without a value. What the function raises
    is for the caller to count.
    """

    function: Callable[..., Any]
    name: str

    async def grade(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        answered = [trajectory for trajectory in trajectories if trajectory.answer is not None]
        results = iter(await call_function(self.function, self.name, answered) if answered else ())
        grades = []
        for trajectory in trajectories:
            result = (0.0, "no answer") if trajectory.answer is None else next(results)
            value, reason = result if isinstance(result, tuple) else (result, "")
            if value is not None and not 0 <= float(value) <= 1:  # NaN too
                raise ConfigError(f"outcome {self.name} returned {value!r}; return values in [0, 1], or None")
            reason = valid_unicode(reason)
            grades.append(Grade(None, reason or NO_REWARD) if value is None else Grade(float(value), reason))
        return grades


class JudgeOutcome:
    """Grades by the rubric and the reference of a question, else as `answer_matches` does.

    With several `votes` the judge samples its replies, and the value is the mean of the readable ones.
    `golden` compares with the golden answers whatever else the question has.
    """

    def __init__(self, judge: JudgeService, votes: int = 1, *, golden: bool = False) -> None:
        sampled = replace(judge, sampling=replace(judge.sampling, temperature=1.0))
        self._judges = [replace(sampled, sample=sample) for sample in range(votes)] if votes > 1 else [judge]
        self._golden = golden

    async def grade(self, trajectories: Sequence[Trajectory]) -> list[Grade]:
        return await gather_all(map(self._grade, trajectories))

    async def _grade(self, trajectory: Trajectory) -> Grade:
        if trajectory.answer is None:
            return Grade(0.0, "no answer")
        asked = (self._verdict(judge, trajectory.question, trajectory.answer) for judge in self._judges)
        votes = await gather_all(asked)
        values = [value for value, _ in votes if value is not None]
        # That of the first verdict; if no verdict could be read, its cause.
        _, reason = min(votes, key=lambda vote: vote[0] is None)
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return Grade(fmean(values) if values else None, reason, error, len(votes))

    async def _verdict(self, judge: JudgeService, question: Question, answer: str) -> tuple[float | None, str]:
        try:
            if (question.rubric or question.reference) and not self._golden:
                return await answer_score(judge, question, answer)
            is_match = await answer_matches(judge, answer, question.golden_answers)
            return float(is_match), f"means the same as {'a' if is_match else 'no'} golden answer"
        except JudgeError as error:
            return None, error.cause


def open_outcome(config: OutcomeConfig, judge: JudgeService | None = None, given: Any = None) -> Outcome:
    """Open the outcome that the settings name, or the `given` one: a function, or an object with `grade`.

    Raises:
        ConfigError: its name is unknown, no judge is given, or a function has no known form.
    """
    name = config.name
    if given is None and name == "judge":
        if judge is None:
            raise ConfigError("outcome judge needs a judge; add --judge with a model that decides")
        return JudgeOutcome(judge, config.votes)
    if given is None and name not in RULES and ":" not in name:
        raise ConfigError(f"outcome {name!r} is unknown{nearest(name, (*RULES, 'judge'))}, python:PACKAGE.MODULE:NAME")
    outcome: Any = given or RULES.get(name) or import_plugin(name)
    if not hasattr(outcome, "grade"):
        trl_columns(outcome, name)
        outcome = FunctionOutcome(outcome, name)
    return outcome  # type: ignore[no-any-return]


def check_outcome(config: OutcomeConfig) -> None:
    """Raise ConfigError if the outcome cannot be opened, before a model is loaded."""
    if config.name not in ("", "judge"):  # "" is that of a reward; a judge's model is checked like any other
        open_outcome(config)


def check_gradable(config: OutcomeConfig, questions: Sequence[Question]) -> None:
    """Raise DataError if the outcome has nothing to compare an answer to a question with, so that it would be 0."""
    if config.name not in RULES:
        return
    lacking = [each.id for each in questions if not (each.golden_answers or (config.name == "list" and each.items))]
    if lacking:
        raise DataError(
            f"--outcome {config.name} cannot grade {len(lacking)} questions without golden_answers, first "
            f"{quoted(lacking[0])}: take --outcome list for items, or judge for a rubric or a reference"
        )


async def graded(outcome: Outcome, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with the grade of its answer; raise LLMError if a judge does not answer."""
    (grade,) = await outcome.grade([trajectory])
    if grade.value is None and grade.reason in ("timeout", "unreachable"):  # it may answer later
        raise LLMError("the judge of the outcome does not answer", cause=grade.reason)
    return replace(trajectory, grade=grade)
