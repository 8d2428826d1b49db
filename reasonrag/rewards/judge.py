"""`JudgeService`: one service that asks a model for verdicts, for every judged reward, value and metric.

A failure is never a score: an unreadable reply is asked for again, and a judge that stays unreadable, is late or is
unreachable raises `JudgeError` and is counted. The texts to judge are quoted, so that nothing in them can be taken for
the judge's own words.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from reasonrag.core.errors import JudgeError, LLMError
from reasonrag.core.text import quotable
from reasonrag.core.types import Message, Prompt, Trajectory
from reasonrag.formats.base import PromptSet, fingerprint
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
    """Parse the score in [0, 1] that a judge's reply ends with; None if there is none.

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
