"""The questions put to a judge, and how its replies are parsed: HiPRAG, Search-P1, When-to-search.

Each function asks once, with the retries of `JudgeService`, and raises `JudgeError` if there is no verdict. The texts
to judge are quoted: tags in them lose their opening bracket and every text is one line, so no trajectory, passage or
answer can speak for the judge. Replies are parsed strictly: anything unclear is no verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from reasonrag.core.documents import unique
from reasonrag.core.errors import JudgeError
from reasonrag.core.text import one_line
from reasonrag.core.types import Question
from reasonrag.formats.tags import last_tag, tags
from reasonrag.rewards.judge import Contract, Fields, JudgeService

MAX_STEPS = 100  # planned or executed steps that a judge may count: a larger number is an error of the judge
PLANNER_SCORES = (0.2, 0.6, 1.0, 1.2)
ACCURACY_SCORES = (0.0, 0.5, 1.0)
REASONING_SCORES = (0.0, 0.5, 0.8, 1.0)

_MARKS = " \t\r\n*_`\"'“”"

_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_STEPS)]


def _one_of(allowed: tuple[float, ...]) -> Any:
    def check(value: object) -> float:
        # True equals 1.0, and is no score.
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise ValueError(f"is none of {allowed}")
        return float(value)

    return PlainValidator(check)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """How to answer a question without a needless step: a text, and the searches in order (Search-P1, sec. 3.2.1)."""

    planner: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PathScores:
    """The six scores of Search-P1's evaluator (App. D.3)."""

    planner_score: Annotated[float, _one_of(PLANNER_SCORES)]  # the policy's plan: bad, average, good, excellent
    model_plan_steps: _Count  # n_plan of Eq. 6
    effective_steps_self: _Count  # n_exec of Eq. 6, at most `model_plan_steps`
    effective_steps_ref: _Count  # n_covered of Eq. 7, at most the number of reference steps
    outcome_accuracy_score: Annotated[float, _one_of(ACCURACY_SCORES)]
    outcome_reasoning_score: Annotated[float, _one_of(REASONING_SCORES)]


_PATH_REPLY = TypeAdapter(PathScores)


async def same_meaning(judge: JudgeService, statement: str, other: str) -> bool:
    """Return whether two statements say the same (HiPRAG, Fig. 5): a search for something known was needless."""
    return await judge.ask("same_meaning", {"Statement 1": statement, "Statement 2": other}, BOOLEAN)


async def step_holds(judge: JudgeService, reasoning: str, conclusion: str) -> bool:
    """Return whether a step without a search is right in its facts and its logic (HiPRAG, Fig. 6)."""
    return await judge.ask("step_holds", {"Reasoning": reasoning, "Conclusion": conclusion}, BOOLEAN)


async def path_scores(judge: JudgeService, question: Question, plan: ReferencePlan, trajectory_text: str) -> PathScores:
    """Return the six scores of a trajectory, in one call (Search-P1, App. D.3).

    Args:
        judge: the evaluator.
        question: shown with its golden answers.
        plan: the reference plan; if it has no steps, `effective_steps_ref` has no meaning.
        trajectory_text: with its tags; each element is shown on a separate line.
    """
    fields: Fields = {
        "Question": question.question,
        "Golden answers": " | ".join(question.golden_answers),
        "Reference planner": plan.planner,
        "Reference path": plan.steps,
        # A verdict in JSON that the policy wrote must not look like the judge's, should the judge quote it.
        "Trajectory": [p.replace("{", "｛") for p in _BEFORE_TAG.split(trajectory_text) if p.strip()],
    }
    read = partial(read_path, reference_steps=len(plan.steps) or MAX_STEPS)
    return await judge.ask("path", fields, Contract(read, _PATH_FORM))


async def answer_matches(judge: JudgeService, prediction: str, golden_answers: Sequence[str]) -> bool:
    """Return whether the prediction means the same as one of the golden answers (LasJ; When-to-search, App. B.4).

    The texts are shown unchanged, not normalised as in the paper: without punctuation "3.5" and "35" are the same.
    """
    fields = {"Prediction": prediction, "Reference answers": " | ".join(golden_answers)}
    return await judge.ask("answer", fields, YES_NO)


async def propose_plan(judge: JudgeService, question: Question) -> ReferencePlan:
    """Return a plan made from the question and its golden answers alone (Search-P1, Alg. 1, App. D.2)."""
    # No other label: a policy's own prompt begins with "Question".
    fields = {"Question to plan": question.question, "Golden answers": " | ".join(question.golden_answers)}
    return await judge.ask("plan", fields, _PLAN)


async def vote_plan(judge: JudgeService, question: Question, candidates: Sequence[ReferencePlan]) -> ReferencePlan:
    """Return the fewest steps that are essential to the correct trajectories (Search-P1, Eq. 5).

    Args:
        judge: the voter.
        question: the question of all candidates; shown with its golden answers, as in App. D.2.
        candidates: plan and searches of each correct trajectory; a plan may be empty.

    Raises:
        JudgeError: there is no plan, or no candidate (`no_candidates`; nothing is asked then).
    """
    if not candidates:
        raise JudgeError(f"no trajectory of question {question.id!r} to vote on", cause="no_candidates")
    fields: dict[str, str | Sequence[str]] = {
        "Question": question.question,
        "Golden answers": " | ".join(question.golden_answers),
    }
    for number, candidate in enumerate(candidates, 1):
        fields |= {f"Planner {number}": candidate.planner, f"Path {number}": candidate.steps}
    return await judge.ask("vote", fields, _PLAN)


def read_boolean(reply: str) -> bool | None:
    """Parse the last well-formed `<answer>`: True or Yes, False or No, else None.

    A reply that lists both choices ("<answer>True</answer> or <answer>False</answer>") is no verdict.

    >>> read_boolean("They agree. <answer>True</answer>"), read_boolean("<answer>no.</answer>")
    (True, False)
    >>> read_boolean("<answer>True</answer> or <answer>False</answer>"), read_boolean("True")
    (None, None)
    """
    said = _after_thinking(reply)
    words = [_word(body) for _, body in tags(said, ("answer",))]
    between = said.rpartition("<answer>")[0].rpartition("</answer>")[2]
    if not words or (len(set(words[-2:])) == 2 and between.strip(" \n,/|").lower() in ("", "or", "and")):
        return None
    return {"true": True, "yes": True, "false": False, "no": False}.get(words[-1])


def read_yes_no(reply: str) -> bool | None:
    """Parse YES or NO as the only word, in any case; quotes, emphasis and a final mark around it are ignored.

    >>> read_yes_no("**YES**."), read_yes_no("no"), read_yes_no("YES or NO"), read_yes_no("True")
    (True, False, None, None)
    """
    return {"yes": True, "no": False}.get(_word(_after_thinking(reply)))


def read_path(reply: str, *, reference_steps: int = MAX_STEPS) -> PathScores | None:
    """Parse the six scores in the last JSON object of the reply; None if one is missing or out of range.

    >>> scores = {"planner_score": 1.2, "model_plan_steps": 2, "effective_steps_self": 2, "effective_steps_ref": 1}
    >>> scores |= {"outcome_accuracy_score": 1, "outcome_reasoning_score": 0.8}
    >>> read_path(f"Here: {json.dumps(scores)}", reference_steps=2).effective_steps_ref
    1
    >>> read_path(json.dumps(scores | {"planner_score": 0.9})) is None
    True
    """
    try:
        scores = _PATH_REPLY.validate_python(last_json_object(_after_thinking(reply)))
    except ValidationError:
        return None
    if scores.effective_steps_self > scores.model_plan_steps or scores.effective_steps_ref > reference_steps:
        return None
    return scores


def read_plan(reply: str) -> ReferencePlan | None:
    """Parse `<correct_reasoning_path>`, a numbered list, and `<optimized_planner>`; None if one is missing or empty.

    >>> path = "<correct_reasoning_path>\\n1. a\\n2. b\\n</correct_reasoning_path>"
    >>> read_plan(f"{path} <optimized_planner>first a</optimized_planner>")
    ReferencePlan(planner='first a', steps=('a', 'b'))
    """
    said = _after_thinking(reply)
    path, planner = last_tag(said, ("correct_reasoning_path",)), last_tag(said, ("optimized_planner",))
    if path is None or planner is None or not _says(planner[1]):
        return None
    lines = [_NUMBERED.fullmatch(line) for line in path[1].splitlines() if line.strip()]
    steps = tuple(one_line(line[1]).strip(_MARKS) for line in lines if line)
    # A line without a number is not ignored: it may be the step that matters.
    if not 0 < len(lines) == len(steps) <= MAX_STEPS or not all(map(_says, steps)):
        return None
    return ReferencePlan(one_line(planner[1]), steps)


def last_json_object(reply: str) -> dict[str, Any] | None:
    """Return the last outermost JSON object in a text, fenced or not; None if there is none.

    NaN, Infinity and duplicate keys are not accepted as JSON.

    >>> last_json_object('first {"a": 1}, then ```json\\n{"a": {"b": 2}}\\n```')
    {'a': {'b': 2}}
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_no_constant)
    found: dict[str, Any] | None = None
    begun, failures = _OBJECT.search(reply), 0
    while begun:
        try:
            found, end = decoder.raw_decode(reply, begun.start())
        except ValueError:
            end, failures = begun.end(), failures + 1
        except RecursionError:  # nested a thousand deep
            failures = _MOST_TRIED
        if failures == _MOST_TRIED:
            return None  # each try may read the whole rest: trying every brace would take quadratic time
        begun = _OBJECT.search(reply, end)
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _after_thinking(reply: str) -> str:
    """Return the reply after `</think>`; "" if the model never stopped thinking."""
    said = reply.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def _word(text: str) -> str:
    return text.strip(f"{_MARKS}.!").lower()


def _says(text: str) -> bool:
    """Return whether the text has content: a form that was returned unfilled holds only dots."""
    return any(char.isalnum() for char in text)


_NUMBERED = re.compile(r"\s*\d+[.)]\s*(.*)")
_OBJECT = re.compile(r"\{[ \t\n\r]*(?=[\"}])")  # as an object of JSON begins, and no formula
_MOST_TRIED = 100
_BEFORE_TAG = re.compile(r"(?=<\w+>)")

BOOLEAN = Contract(
    read_boolean, "Reply with one word in this tag only, True or False instead of the dots: <answer>...</answer>"
)
YES_NO = Contract(read_yes_no, "Reply with one word only, YES or NO.")
_PATH_FORM = (
    "Reply with one JSON object only: planner_score (0.2, 0.6, 1.0 or 1.2); model_plan_steps, effective_steps_self (at "
    "most model_plan_steps) and effective_steps_ref (at most the steps of the reference path), whole numbers from 0; "
    "outcome_accuracy_score (0, 0.5 or 1); outcome_reasoning_score (0, 0.5, 0.8 or 1)."
)
_PLAN_FORM = (
    "Reply in this form only:\n<correct_reasoning_path>\n1. ...\n2. ...\n</correct_reasoning_path>\n"
    "<optimized_planner>\n...\n</optimized_planner>"
)
_PLAN = Contract(read_plan, _PLAN_FORM)
