"""The metrics of an evaluation: one registry, from which results, tables, charts, pages and cards follow.

LasJ, OSR and USR rest on verdicts of a judge: LasJ follows
When-to-search, sec. 4.1; OSR and USR HiPRAG, eq. 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import Rules, cover_match, exact_match, one_line, token_f1
from reasonrag.core.types import Grade, Malformed, Question, Search, StopReason, Trajectory
from reasonrag.formats.base import PromptSet, Reading
from reasonrag.llm.base import LLM
from reasonrag.pipeline.tables import step_columns
from reasonrag.rewards.answers import JudgeOutcome
from reasonrag.rewards.base import Outcome, cause_of, grades_of
from reasonrag.rewards.hiprag import StepFlag, detect
from reasonrag.rewards.judge import templates_fingerprint
from reasonrag.storage.parquet import Row
from reasonrag.storage.tables import trajectory_schema

Value = float | int | bool | None
Place = Literal["terminal", "page", "card"]  # report.md and metrics.json have all metrics

_MUSIQUE = re.compile(r"([2-4])hop\d?(?:__|$)")  # "3hop1__9285_5188_23307" as an id, "3hop1" as a type
_LONGEST_KIND = 60


JUDGED = ("lasj", "osr", "usr")

# Texts of the prompt set that each metric needs, and the name that its verdicts are counted under.
_TEXTS = {
    "lasj": ("judge/answer",),
    "osr": ("judge/same_meaning", "hiprag/direct"),
    "usr": ("judge/step_holds",),
    "outcome": ("judge/answer", "judge/grade"),
}
COUNTED_AS = {"lasj": "answer", "osr": "over", "usr": "under", "outcome": "outcome"}


def check_judged(metrics: Sequence[str], prompts: PromptSet) -> None:
    """Raise ConfigError unless a judge can be asked for these metrics, with the texts of a prompt set."""
    if not _TEXTS.keys() >= set(metrics):
        raise ConfigError(f"a judge is asked for some of {', '.join(JUDGED)}, not for {', '.join(metrics)!r}")
    for metric in metrics:
        for name in _TEXTS[metric]:
            prompts.text(name)


class StepCounts(NamedTuple):
    """Steps of one kind in one attempt: wrong ones among the known, all known ones, and those without a verdict."""

    suboptimal: int
    known: int
    unknown: int

    @classmethod
    def of(cls, flags: Sequence[StepFlag], kind: str) -> StepCounts:
        """Count the steps of a kind.

        >>> StepCounts.of([StepFlag("search", True), StepFlag("search", None), StepFlag("own", False)], "search")
        StepCounts(suboptimal=1, known=1, unknown=1)
        """
        verdicts = [flag.suboptimal for flag in flags if flag.kind == kind]
        return cls(verdicts.count(True), len(verdicts) - verdicts.count(None), verdicts.count(None))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A judge's verdicts on one attempt; None if it was not asked, and for `lasj` also if it gave no verdict."""

    lasj: bool | None = None
    searches: StepCounts | None = None  # steps with a search; needless ones are suboptimal
    own_steps: StepCounts | None = None  # steps without a search; false ones are suboptimal
    grade: Grade | None = None  # None if the outcome is F1


NOT_JUDGED = Verdicts()


@dataclass(frozen=True, slots=True)
class Examiner:
    """Asks a judge about all attempts of one policy, right or wrong, in form or not: eq. 2 is over all their steps."""

    judge: Any  # a `JudgeService` if `metrics` ask one; one of its prompts, `hiprag/direct`, is sent to the policy
    policy: LLM  # made the attempts; it is asked again, by greedy decoding and without a search
    metrics: Sequence[str]  # some of `JUDGED`
    outcome: Outcome | None = None  # grades the answers

    def describe(self) -> dict[str, Any]:
        metrics = [metric for metric in JUDGED if metric in self.metrics] + ["outcome"] * bool(self.outcome)
        model, prompts = (self.judge.llm.name, templates_fingerprint(self.judge.prompts)) if self.judge else ("", "")
        return {"model": model, "prompts": prompts, "metrics": metrics}

    async def examine(self, trajectory: Trajectory, reading: Reading, counts: Counter[str]) -> Verdicts:
        """Return the verdicts on a finished attempt, given also as its format reads it.

        If the judge or the policy fails, a verdict is unknown; the
        attempt's other scores do not change. `counts` are incremented by
        name: `answer.asked`, `answer.unknown`, `answer.CAUSE`; `over.*` and
        `under.*` as `rewards.hiprag.detect` counts them; `regenerated`.
        """
        lasj = grade = None
        if "lasj" in self.metrics:
            right = await self._grade(JudgeOutcome(self.judge, golden=True), trajectory, counts, "answer")
            lasj = None if right.value is None else right.value > 0
        if self.outcome is not None:
            grade = await self._grade(self.outcome, trajectory, counts, "outcome")
        over, under = "osr" in self.metrics, "usr" in self.metrics
        flags = await self._flags(reading, counts, over=over, under=under) if over or under else []
        searches = StepCounts.of(flags, "search") if over else None
        return Verdicts(lasj, searches, StepCounts.of(flags, "own") if under else None, grade)

    async def _grade(self, outcome: Outcome, trajectory: Trajectory, counts: Counter[str], name: str) -> Grade:
        """Return the grade of an answer, and count it; a missing answer costs no call."""
        counts[f"{name}.asked"] += trajectory.answer is not None
        (grade,) = await grades_of(outcome, [trajectory])
        if grade.value is None:
            counts.update([f"{name}.unknown", f"{name}.{grade.reason}"])
        return grade

    async def _flags(self, reading: Reading, counts: Counter[str], *, over: bool, under: bool) -> list[StepFlag]:
        """Return a flag per step; steps of a metric that is not asked for cost no call."""
        try:
            (flags,) = await detect(
                [reading], judge=self.judge, policy=self.policy, over_search=over, under_search=under, counts=counts
            )
        except Exception as error:  # some policies answer no prompts but those of their format
            flags = [StepFlag("search" if block.is_search else "own", None) for block in reading.blocks]
            for is_asked, detector, kind in ((over, "over", "search"), (under, "under", "own")):
                unknown = is_asked * sum(flag.kind == kind for flag in flags)
                counts.update({f"{detector}.unknown": unknown, f"{detector}.{cause_of(error)}": unknown})
        return flags


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished attempt at a question, as its format reads it; metrics are computed from it."""

    trajectory: Trajectory
    reading: Reading | None = None
    verdicts: Verdicts = NOT_JUDGED
    rules: Rules = "house"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the mean of a value over questions, or a rate: the sum of `value` over the sum of `whole`.

    The values of attempts stand in the Parquet column of the same name if the schema has one.

    Attributes:
        label: heading of its column in tables.
        help: its meaning, for the report.
        value: of one attempt; None if it is unknown.
        whole: the denominator of a rate, of one attempt.
        shown_in: further places that show it; the tables of the report show all metrics.
        columns: Parquet columns of `value` and `whole` if they have other names.
        judged: whether a judge has to be asked.
        digits: after the decimal point.
    """

    name: str
    label: str
    help: str
    value: Callable[[Attempt], Value]
    whole: Callable[[Attempt], Value] | None = None
    shown_in: frozenset[Place] = frozenset()
    columns: tuple[str, ...] = ()
    judged: bool = False
    digits: int = 3

    @property
    def parts(self) -> dict[str, Callable[[Attempt], Value]]:
        """The functions of an attempt, by Parquet column."""
        functions = (self.value,) if self.whole is None else (self.value, self.whole)
        return dict(zip(self.columns or (self.name,), functions, strict=True))


def _answer_metric(metric: Callable[..., float]) -> Callable[[Attempt], Value]:
    return lambda attempt: metric(
        attempt.trajectory.answer, attempt.trajectory.question.golden_answers, rules=attempt.rules
    )


def _is_well_formed(attempt: Attempt) -> float:
    """Return the result of the format's checker; without one, an attempt needs an answer and readable steps."""
    if attempt.reading is not None:
        return float(attempt.reading.well_formed)
    is_readable = not any(isinstance(step.action, Malformed) for step in attempt.trajectory.steps)
    return float(is_readable and attempt.trajectory.answer is not None)


def _searches(attempt: Attempt) -> int:
    return sum(isinstance(step.action, Search) for step in attempt.trajectory.steps)


def _steps(attempt: Attempt) -> int:
    return sum(step.asked for step in attempt.trajectory.steps)


def _is_forced(attempt: Attempt) -> int:
    return int(attempt.trajectory.stop_reason is StopReason.FORCED_ANSWER)


def _tokens(kind: str) -> Callable[[Attempt], int | None]:
    """Return the sum over the steps; None if a step's count is unknown, as a sum over the others is too small."""

    def total(attempt: Attempt) -> int | None:
        # A backend may report the tokens of some calls only.
        counts = [getattr(step.completion, kind) for step in attempt.trajectory.steps]
        return None if None in counts else sum(counts)

    return total


def _verdict(kind: Literal["searches", "own_steps", "grade"], part: str = "value") -> Callable[[Attempt], Value]:
    """Return a part of a verdict; None if there is no such verdict."""
    return lambda attempt: getattr(getattr(attempt.verdicts, kind), part, None)


_MAIN: frozenset[Place] = frozenset(("terminal", "card"))
_CHARTED: frozenset[Place] = _MAIN | {"page"}
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("em", "EM", "the answer equals a golden answer", _answer_metric(exact_match), shown_in=_CHARTED),
        Metric("f1", "F1", "overlap of words with the golden answer", _answer_metric(token_f1), shown_in=_CHARTED),
        Metric("acc", "ACC", "the prediction contains a golden answer", _answer_metric(cover_match), shown_in=_MAIN),
        Metric("outcome", "outcome", "the outcome by --outcome", _verdict("grade"), shown_in=_CHARTED, judged=True),
        Metric("retrievals", "searches", "searches (RC)", _searches, shown_in=_MAIN),
        Metric("steps", "steps", "decisions of the policy", _steps, shown_in=_MAIN),
        Metric("forced", "forced answers", "share of answers forced at the step limit", _is_forced),
        Metric(
            "format_rate",
            "format rate",
            "share of attempts that the format's own checker accepts",
            _is_well_formed,
            shown_in=_MAIN,
        ),
        Metric("prompt_tokens", "prompt tokens", "tokens read", _tokens("prompt_tokens"), digits=0),
        Metric("completion_tokens", "written tokens", "tokens written", _tokens("completion_tokens"), digits=0),
        Metric(
            "lasj",
            "LasJ",
            "the answer means the same as a golden answer; a missing answer does not",
            lambda attempt: attempt.verdicts.lasj,
            shown_in=_CHARTED,
            judged=True,
        ),
        Metric(
            "osr",
            "OSR",
            "needless searches (the policy already knew what they returned) among all searches",
            _verdict("searches", "suboptimal"),
            _verdict("searches", "known"),
            shown_in=_MAIN,
            columns=("steps_over", "searches_known"),
            judged=True,
        ),
        Metric(
            "usr",
            "USR",
            "false steps among all steps that do not search",
            _verdict("own_steps", "suboptimal"),
            _verdict("own_steps", "known"),
            shown_in=_MAIN,
            columns=("steps_under", "own_steps_known"),
            judged=True,
        ),
    )
}


def attempt_values(attempt: Attempt) -> dict[str, Value]:
    """Return what all metrics are computed from, by column; a trajectory that has not ended has no scores."""
    if attempt.trajectory.stop_reason is None:
        raise ValueError("a trajectory that has not ended has no scores")
    return {column: compute(attempt) for metric in METRICS.values() for column, compute in metric.parts.items()}


def kind(question: Question) -> str:
    """Return the kind that the data set gives a question (arXiv:2505.14069, App. D); "" if it gives none.

    "known" if the policy has seen the fact. The kinds of MuSiQue are
    its numbers of hops, whatever the shape of the decomposition.

    >>> kind(Question("3hop1__9285_5188_23307", "...", ("x",)))
    '3hop'
    """
    metadata = question.metadata
    # The demo world marks the facts that its policy has been trained on.
    if metadata.get("known"):
        return "known"
    named = metadata.get("kind") or metadata.get("type") or metadata.get("question_type")
    if isinstance(named, str) and named.strip() and not _MUSIQUE.match(named):
        return one_line(named)[:_LONGEST_KIND]
    musique_hops = _musique_hops(question)
    return f"{musique_hops}hop" if musique_hops else ""


def hops(question: Question) -> int | None:
    """Return how many searches a question needs; None if the data set does not give the number.

    The demo world has the number, MuSiQue has it in ids and types.
    """
    stated = question.metadata.get("hops")
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated < 1000:
        return stated
    return _musique_hops(question)


def trajectory_row(attempt: Attempt, values: dict[str, Value]) -> Row:
    """Return an attempt and its `attempt_values` as a row of `tables.trajectory_schema`, with all texts verbatim."""
    trajectory, reading = attempt.trajectory, attempt.reading
    question = trajectory.question
    assert reading is not None
    row = {
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "kind": kind(question),
        "hops": hops(question),
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
        "well_formed": reading.well_formed,
        "reason": reading.reason,
        "trajectory": list(map(step_columns, trajectory.steps)),
        "grade": attempt.verdicts.grade and asdict(attempt.verdicts.grade),
        **values,
    }
    return {name: row[name] for name in trajectory_schema().names}


def _musique_hops(question: Question) -> int | None:
    for text in (question.id, question.metadata.get("id"), question.metadata.get("type")):
        if isinstance(text, str) and (match := _MUSIQUE.match(text)):
            return int(match[1])
    return None
