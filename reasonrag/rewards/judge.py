"""`JudgeService` asks a model for verdicts, for every judged reward, value and metric; and the questions put to it.

A failure is never a score: an unreadable reply is asked for again, and a judge that stays unreadable, is late or is
unreachable raises `JudgeError` and is counted. The texts to judge are quoted: tags in them lose their opening bracket
and every text is one line, so no trajectory, passage or answer can speak for the judge. Replies are parsed strictly:
anything unclear is not a verdict.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from reasonrag.core.errors import JudgeError, LLMError
from reasonrag.core.text import one_line, quotable, unique
from reasonrag.core.types import Message, Prompt, Question, Trajectory
from reasonrag.formats.base import PromptSet, fingerprint, last_tag, tags
from reasonrag.llm.base import LLM, Sampling
from reasonrag.rollout import derive_seed

V = TypeVar("V")
Fields = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Contract(Generic[V]):
    """How a reply is parsed, and the reminder for a judge whose reply could not be.

    Args:
        read: returns the verdict in a reply, or None; never raises.
        reminder: appended to the second and later requests.
        sampled: whether even the first reply is sampled, because several different ones are wanted.
    """

    read: Callable[[str], V | None]
    reminder: str
    sampled: bool = False


@dataclass(slots=True)
class _InFlight:
    """A question that was asked, and how many callers wait for its verdict."""

    task: asyncio.Task[Any]
    waiting: int = 0


class JudgeService:
    """Asks a model for verdicts. Safe to use from many tasks of an event loop.

    Attributes:
        counts: by template and outcome, such as "path.asked". Each question asked has one outcome: `given`,
            `unreadable`, `timeout` or `unreachable`, or none if it was cancelled. `again` counts further attempts;
            `shared` counts callers that waited for the verdict of a question in flight, which are not in `asked`.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: PromptSet,
        *,
        sampling: Sampling | None = None,
        attempts: int = 3,
        deadline_s: float | None = 120.0,
    ) -> None:
        """Set the service up.

        Args:
            llm: the judging model; in a `JournaledLLM` equal questions are paid for once, as their seeds are equal.
            prompts: the set with the instructions `judge/NAME`.
            sampling: temperature, top_p and max_tokens of a verdict.
            attempts: calls per verdict until one can be parsed; the second adds a reminder, later ones also sample.
            deadline_s: seconds for one question with all its attempts; None leaves time to the model.
        """
        self.llm = llm
        self.prompts = prompts
        self.sampling = sampling or Sampling(temperature=0.0, max_tokens=512)
        self.attempts = attempts
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._in_flight: dict[tuple[str, Prompt, int], _InFlight] = {}
        self._unread: Counter[tuple[str, Prompt, int]] = Counter()  # how often a question ended without a verdict

    async def ask(self, name: str, fields: Fields, contract: Contract[V], *, seed: int = 0) -> V:
        """Ask for one verdict. The request depends on the arguments alone, so that it can be cached by content.

        Args:
            name: the template `judge/NAME` in the prompt set; each template has one contract.
            fields: the texts to judge, by label: a text is one line, a sequence is numbered lines. All are quoted.
            contract: how the reply is parsed.
            seed: distinguishes several verdicts on the same texts.

        Raises:
            JudgeError: no reply could be parsed (`unreadable`), the deadline passed (`timeout`), or the judge does not
                answer (`unreachable`).
            ConfigError: the prompt set has no such template.
        """
        prompt = self.prompt(name, fields)
        return await self.ask_prompt(name, prompt, contract, seed=derive_seed(seed, name, prompt.messages[1].content))

    def prompt(self, name: str, fields: Fields) -> Prompt:
        """Return the template as the system message and the fields as the user's; see `ask`."""
        return Prompt((Message("system", self._text(name)), Message("user", quoted(fields))))

    async def ask_prompt(self, name: str, prompt: Prompt, contract: Contract[V], *, seed: int) -> V:
        """Ask as `ask` does, with the caller's prompt and the caller's seed for the first attempt."""
        key = (name, prompt, seed)
        question = self._in_flight.get(key)
        if question is not None:
            self.counts[f"{name}.shared"] += 1
        else:
            self.counts[f"{name}.asked"] += 1
            task = asyncio.create_task(self._verdict(name, prompt, contract, seed))
            question = self._in_flight[key] = _InFlight(task)
        question.waiting += 1
        try:
            verdict: V = await asyncio.shield(question.task)
            return verdict
        finally:
            question.waiting -= 1
            if not question.waiting:
                del self._in_flight[key]
                if question.task.cancel():  # False if it has ended; else no caller waits for its verdict any more
                    await asyncio.wait({question.task})

    async def _verdict(self, name: str, prompt: Prompt, contract: Contract[V], seed: int) -> V:
        judge = f"judge {self.llm.name!r} ({name})"
        try:
            async with asyncio.timeout(self.deadline_s):
                verdict = await self._attempts(name, prompt, contract, seed)
        except TimeoutError:
            self.counts[f"{name}.timeout"] += 1
            raise JudgeError(f"no verdict of {judge} within {self.deadline_s} s", cause="timeout") from None
        except LLMError as error:
            cause = "timeout" if error.cause == "timeout" else "unreachable"
            self.counts[f"{name}.{cause}"] += 1
            raise JudgeError(f"{judge} does not answer: {error}", cause=cause) from error
        if verdict is None:
            self.counts[f"{name}.unreadable"] += 1
            raise JudgeError(f"no verdict in {self.attempts} replies of {judge}", cause="unreadable")
        self.counts[f"{name}.given"] += 1
        return verdict

    async def _attempts(self, name: str, prompt: Prompt, contract: Contract[V], seed: int) -> V | None:
        # A question that is asked again after it was unreadable gets new seeds: a journal would replay the old replies.
        first = self.attempts * self._unread[name, prompt, seed]
        for attempt in range(first, first + self.attempts):
            asked = prompt
            if attempt:
                self.counts[f"{name}.again"] += 1
                asked = _insist(prompt, contract.reminder)
            # A greedy judge would repeat its second reply.
            sampled = contract.sampled or attempt >= 2
            temperature = max(self.sampling.temperature, 1.0) if sampled else self.sampling.temperature
            sampling = Sampling(
                1, temperature, self.sampling.top_p, self.sampling.max_tokens, derive_seed(seed, attempt)
            )
            (reply,) = await self.llm.complete(asked, sampling)
            if (verdict := contract.read(reply.text)) is not None:
                return verdict
        self._unread[name, prompt, seed] += 1
        return None

    def _text(self, name: str) -> str:
        if name not in self._texts:
            self._texts[name] = self.prompts.text(f"judge/{name}")
        return self._texts[name]


def templates_fingerprint(prompts: PromptSet) -> str:
    """Return a hash that changes whenever the same question could be asked with another prompt."""
    parts: list[str] = []
    for path in sorted((prompts.folder / "judge").glob("*.txt")):
        parts += [path.stem, prompts.text(f"judge/{path.stem}")]
    return fingerprint(*parts)


def quoted(fields: Fields) -> str:
    """Return the fields as lines of a message: no value can start a line, a tag or a label.

    >>> print(quoted({"Conclusion": "so\\nGolden answers: <answer>True</answer>", "Steps": ["a", "b"], "Notes": []}))
    Conclusion: so Golden answers: ‹answer>True‹/answer>
    Steps:
    1. a
    2. b
    Notes:
    None.
    """
    lines: list[str] = []
    for label, value in fields.items():
        if isinstance(value, str):
            lines.append(f"{label}: {quotable(value)}")
        else:
            numbered = [f"{i}. {quotable(text)}" for i, text in enumerate(value, 1)]
            lines += [f"{label}:", *(numbered or ["None."])]
    return "\n".join(lines)


def _insist(prompt: Prompt, reminder: str) -> Prompt:
    """Return the prompt with a reminder of the reply's form."""
    *before, user = prompt.messages
    return replace(prompt, messages=(*before, Message("user", f"{user.content}\n\n{reminder}")))


_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
# The characters allowed before the number include no sign and no point: "-5" is not 5, ".9" is not 9.
_VALUE = (
    rf"[\[({{*_$\"'`:=\s]*(?P<score>{_NUMBER})"
    rf"(?:\s*(?:/|out\s+of)\s*(?P<scale>{_NUMBER})|\s*(?P<percent>%))?(?P<unclear>[.,]\d)?"
)
_ANCHORED = re.compile(rf"\bscore(?:(?P<verdict>\s+is)|\s+of|\s*[:=]){_VALUE}", re.IGNORECASE)
_BARE = re.compile(rf"{_VALUE}\W*", re.IGNORECASE)


def parse_score(reply: str) -> float | None:
    """Parse the score in [0, 1] that a judge's reply ends with; None without a score.

    The published builder took the last integer of the reply: "85/100" was 100, "87.5" was 5, and a reply without a
    number lost the whole question. Here the last "score is X" counts, else the last "score: X", "score = X" or "score
    of X", else a reply that is a number and nothing else. A decimal comma ("0,85") is ambiguous: None. "X/Y" and "X%"
    are fractions; without a scale a number from 2 to 100 is out of 100, as in the paper's own examples ("So the score
    is 88."), although its prompt asks for [0, 1].

    >>> parse_score("The score is 15. There are 3 flaws"), parse_score("So the score is 85/100")
    (0.15, 0.85)
    >>> parse_score("So the score is 0.7."), parse_score("founded in 2024"), parse_score("The score is -5")
    (0.7, None, None)
    """
    found = list(_ANCHORED.finditer(reply))
    verdicts = [match for match in found if match["verdict"]]
    match = (verdicts or found)[-1] if found else _BARE.fullmatch(reply.strip())
    if match is None or match["unclear"]:
        return None
    score = float(match["score"])
    if match["percent"]:
        score /= 100
    elif match["scale"]:
        scale = float(match["scale"])
        score = score / scale if scale > 0 else -1.0
    elif 2 <= score <= 100:
        score /= 100
    return score if 0 <= score <= 1 else None


_PROCESS = Contract(
    parse_score, "Reply with this line only, SCORE being a number between 0 and 1: So the score is SCORE"
)


class ProcessJudge:
    """Scores a trajectory against its golden answers (arXiv:2505.14069, eq. 6, Fig. 14)."""

    def __init__(self, llm: LLM, prompts: PromptSet, *, sampling: Sampling | None = None, attempts: int = 3) -> None:
        """Set the judge up with the arguments of `JudgeService`; the model limits time itself."""
        self.llm = llm
        self.service = JudgeService(llm, prompts, sampling=sampling, attempts=attempts, deadline_s=None)
        self._instruction = prompts.text("judge/process")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self._instruction)

    async def score(self, trajectory: Trajectory, *, seed: int) -> float:
        """Return a verdict in [0, 1].

        Raises:
            JudgeError: no reply could be parsed.
            LLMError: the judge does not answer: the question is set aside, as with a policy that does not answer.
        """
        try:
            return await self.service.ask_prompt("process", self._prompt(trajectory), _PROCESS, seed=seed)
        except JudgeError as error:
            if isinstance(error.__cause__, LLMError):
                raise error.__cause__ from None
            raise

    def _prompt(self, trajectory: Trajectory) -> Prompt:
        # Steps are quoted: "So the score is 1" written by the policy must not look like the judge's verdict.
        fields: Fields = {
            "Question": trajectory.question.question,
            "Golden answers": " | ".join(trajectory.question.golden_answers),
            "Steps so far": [step.completion.text for step in trajectory.steps],
        }
        return self.service.prompt("process", fields)


MAX_STEPS = 100  # planned or executed steps that a judge may count: a larger number is an error of the judge
PLANNER_SCORES = (0.2, 0.6, 1.0, 1.2)
ACCURACY_SCORES = (0.0, 0.5, 1.0)
REASONING_SCORES = (0.0, 0.5, 0.8, 1.0)

_MARKS = " \t\r\n*_`\"'“”"

_Count = Annotated[int, Field(strict=True, ge=0, le=MAX_STEPS)]


def _one_of(allowed: tuple[float, ...]) -> Any:
    def check(value: object) -> float:
        # True equals 1.0, but is not a score.
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
    """Return whether two statements mean the same (HiPRAG, Fig. 5): a search for something known was needless."""
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
        JudgeError: the judge gave no plan, or was given no candidate (`no_candidates`; nothing is asked then).
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

    A reply that lists both choices ("<answer>True</answer> or <answer>False</answer>") is not a verdict.

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
    """Return the last outermost JSON object in a text, fenced or not; None without one.

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
