"""The questions that a judge is asked, and how its replies are read: HiPRAG, Search-P1, When-to-search.

Each function asks once, with the retries of `JudgeService`, and raises `JudgeError` where there is no verdict. What
is judged is quoted: tags in it lose their opening bracket and every text is one line, so no trajectory, passage or
answer can speak for the judge. A reply is read strictly: what is not plainly a verdict is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from reasonrag.core.errors import JudgeError
from reasonrag.core.text import one_line
from reasonrag.core.types import Question
from reasonrag.formats.tags import last_tag, tags
from reasonrag.rewards.judge import Contract, Fields, JudgeService

MAX_STEPS = 100  # planned or executed steps that a judge may count: more is a misreading, not a trajectory
PLANNER_SCORES = (0.2, 0.6, 1.0, 1.2)
ACCURACY_SCORES = (0.0, 0.5, 1.0)
REASONING_SCORES = (0.0, 0.5, 0.8, 1.0)

_MARKS = " \t\r\n*_`\"'“”"


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """How to answer a question with no step too many: a text, and the searches in order (Search-P1, sec. 3.2.1)."""

    planner: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """One proposal of a reference plan, and the answer that it expects, by which it is kept or not (Eq. 5)."""

    planner: str
    steps: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class PathScores:
    """The six scores of Search-P1's evaluator (App. D.3).

    Args:
        planner_score: of the policy's own plan: 0.2 bad, 0.6 average, 1.0 good, 1.2 excellent.
        model_plan_steps: n_plan of Eq. 6, from 0.
        effective_steps_self: n_exec of Eq. 6, from 0 to `model_plan_steps`.
        effective_steps_ref: n_covered of Eq. 7, from 0 to the number of reference steps.
        outcome_accuracy_score: 0, 0.5 or 1.
        outcome_reasoning_score: 0, 0.5, 0.8 or 1.
    """

    planner_score: float
    model_plan_steps: int
    effective_steps_self: int
    effective_steps_ref: int
    outcome_accuracy_score: float
    outcome_reasoning_score: float


async def same_meaning(judge: JudgeService, statement: str, other: str) -> bool:
    """Whether two statements say the same (HiPRAG, Fig. 5): a search that brought what was known was needless.

    Raises:
        JudgeError: there is no verdict.
    """
    return await judge.ask("same_meaning", {"Statement 1": statement, "Statement 2": other}, BOOLEAN)


async def step_holds(judge: JudgeService, reasoning: str, conclusion: str) -> bool:
    """Whether a step made without a search is right in its facts and its logic (HiPRAG, Fig. 6).

    Raises:
        JudgeError: there is no verdict.
    """
    return await judge.ask("step_holds", {"Reasoning": reasoning, "Conclusion": conclusion}, BOOLEAN)


async def path_scores(judge: JudgeService, question: Question, plan: ReferencePlan, trajectory_text: str) -> PathScores:
    """The six scores of a trajectory, in one call (Search-P1, App. D.3).

    Args:
        judge: who is asked.
        question: shown with its golden answers.
        plan: what the trajectory is compared with; without steps, `effective_steps_ref` has no meaning.
        trajectory_text: with its tags; shown with each element on a line of its own.

    Raises:
        JudgeError: there is no verdict; one that counts more steps than there are is none.
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
    """Whether the prediction means the same as one of the golden answers (LasJ; When-to-search, App. B.4).

    The texts are shown as they are, not normalised as in the paper: without punctuation "3.5" and "35" are the same.

    Raises:
        JudgeError: there is no verdict.
    """
    fields = {"Prediction": prediction, "Reference answers": " | ".join(golden_answers)}
    return await judge.ask("answer", fields, YES_NO)


async def propose_plan(
    judge: JudgeService, question: Question, *, sample: int, show_answer: bool = False
) -> PlanCandidate:
    """One sampled candidate for a reference plan (Search-P1, App. D.2, Alg. 1).

    Args:
        judge: who plans.
        question: to plan for.
        sample: number of the candidate; another number is another sample.
        show_answer: show the golden answers, as the prompt in App. D.2 does. Eq. 5 keeps the candidates whose answer is
            right, which tells nothing of a planner that was shown it, so by default it is not.

    Raises:
        JudgeError: there is no plan.
    """
    # No other label: a policy's own prompt begins with "Question".
    fields = {"Question to plan": question.question}
    if show_answer:
        fields["Golden answers"] = " | ".join(question.golden_answers)
    return await judge.ask("plan", fields, _PLAN, seed=sample)


async def vote_plan(judge: JudgeService, question: Question, candidates: Sequence[PlanCandidate]) -> ReferencePlan:
    """The minimal set of steps that the candidates agree on (Search-P1, Eq. 5).

    Args:
        judge: who is asked.
        question: that all of them plan for.
        candidates: those whose answer is right.

    Raises:
        JudgeError: there is no plan, or no candidate (`no_candidates`; nothing is asked then).
    """
    if not candidates:
        raise JudgeError(f"no plan of question {question.id!r} to vote on", cause="no_candidates")
    fields: dict[str, str | Sequence[str]] = {"Question": question.question}
    for number, candidate in enumerate(candidates, 1):
        fields |= {f"Planner {number}": candidate.planner, f"Path {number}": candidate.steps}
    return await judge.ask("vote", fields, _VOTE)


def read_boolean(reply: str) -> bool | None:
    """The word in the last well-formed `<answer>`: True or Yes, False or No, else None.

    A reply that lists choices ("<answer>True</answer> or <answer>False</answer>") has made none.

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
    """YES or NO as the only word, whatever its case; quotes, emphasis and a final mark may stand around it.

    >>> read_yes_no("**YES**."), read_yes_no("no"), read_yes_no("YES or NO"), read_yes_no("True")
    (True, False, None, None)
    """
    return {"yes": True, "no": False}.get(_word(_after_thinking(reply)))


def read_path(reply: str, *, reference_steps: int = MAX_STEPS) -> PathScores | None:
    """The six scores in the last JSON object of the reply, or None where any is missing or out of its range.

    >>> scores = {"planner_score": 1.2, "model_plan_steps": 2, "effective_steps_self": 2, "effective_steps_ref": 1}
    >>> scores |= {"outcome_accuracy_score": 1, "outcome_reasoning_score": 0.8}
    >>> read_path(f"Here: {json.dumps(scores)}", reference_steps=2).effective_steps_ref
    1
    >>> read_path(json.dumps(scores | {"planner_score": 0.9})) is None
    True
    """
    found = last_json_object(_after_thinking(reply))
    try:
        scores = _PathReply.model_validate(found)
    except ValidationError:
        return None
    if scores.effective_steps_self > scores.model_plan_steps or scores.effective_steps_ref > reference_steps:
        return None
    return PathScores(**scores.model_dump())


def read_candidate(reply: str) -> PlanCandidate | None:
    """`<correct_reasoning_path>`, `<optimized_planner>` and `<answer>`, or None where one is missing or empty."""
    plan = read_plan(reply)
    answer = last_tag(_after_thinking(reply), ("answer",))
    if plan is None or answer is None or not _says(answer[1]):
        return None
    return PlanCandidate(plan.planner, plan.steps, one_line(answer[1]))


def read_plan(reply: str) -> ReferencePlan | None:
    """`<correct_reasoning_path>` with a numbered list, and `<optimized_planner>`; None where one is missing or empty.

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
    # A line that is not numbered is not left out: what is missing then may be what matters.
    if not 0 < len(lines) == len(steps) <= MAX_STEPS or not all(map(_says, steps)):
        return None
    return ReferencePlan(one_line(planner[1]), steps)


def last_json_object(reply: str) -> dict[str, Any] | None:
    """The last outermost JSON object in a text, fenced or not; None where there is none.

    NaN, Infinity and a key that occurs twice are no JSON here.

    >>> last_json_object('first {"a": 1}, then ```json\\n{"a": {"b": 2}}\\n```')
    {'a': {'b': 2}}
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    found: dict[str, Any] | None = None
    at = reply.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(reply, at)
        except ValueError:
            end = at + 1
        except RecursionError:
            return None  # nested a thousand deep: no verdict, and each brace would be tried as the first
        at = reply.find("{", end)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _after_thinking(reply: str) -> str:
    """What a model that thinks aloud says when it is done; nothing if it never was."""
    said = reply.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def _word(text: str) -> str:
    """A word without what may stand around it."""
    return text.strip(f"{_MARKS}.!").lower()


def _says(text: str) -> bool:
    """Whether there is more than the dots of a form that was given back as it is."""
    return any(char.isalnum() for char in text)


def _one_of(allowed: tuple[float, ...]) -> Callable[[float], float]:
    def check(value: float) -> float:
        if value not in allowed:
            raise ValueError(f"is none of {allowed}")
        return value

    return check


_Count = Annotated[int, Field(ge=0, le=MAX_STEPS)]


class _PathReply(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    planner_score: Annotated[float, AfterValidator(_one_of(PLANNER_SCORES))]
    model_plan_steps: _Count
    effective_steps_self: _Count
    effective_steps_ref: _Count
    outcome_accuracy_score: Annotated[float, AfterValidator(_one_of(ACCURACY_SCORES))]
    outcome_reasoning_score: Annotated[float, AfterValidator(_one_of(REASONING_SCORES))]


_NUMBERED = re.compile(r"\s*\d+[.)]\s*(.*)")
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
_PLAN = Contract(read_candidate, f"{_PLAN_FORM}\n<answer>...</answer>", sampled=True)
_VOTE = Contract(read_plan, _PLAN_FORM)
