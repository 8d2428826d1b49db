"""The values that all rooms share: frozen, slotted, compared by equality.

They are immutable, so the branches of a tree can share a prefix of steps safely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from reasonrag.core.errors import ConfigError

Role = Literal["system", "tools", "user", "assistant", "call", "tool"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its gold answers (FlashRAG's fields, and the name of its data set).

    `metadata` is kept unchanged and never shown to a policy. Outcomes may
    grade by what else is known of a good answer: a `rubric`, which is a
    criterion a line, a `reference`, which is a good answer at length, or
    the `items` of a list, each in all ways to write it.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    dataset: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)
    rubric: str = ""
    reference: str = ""
    items: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text. `contents` is FlashRAG's field: the title, a newline, the text."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        """First of several lines, without the quotation marks of Search-R1's Wikipedia; "" if there is one line."""
        head, newline, _ = self.contents.partition("\n")
        return head.strip().strip('"') if newline else ""

    @property
    def text(self) -> str:
        """Everything after the title; the whole contents if there is only one line."""
        head, newline, rest = self.contents.partition("\n")
        return rest.strip() if newline else head.strip()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat: who speaks, and what.

    Functions, calls and results are messages too, each a text, as in ShareGPT's layout: `tools` lists the
    functions that may be called, `call` is `{"name": ..., "arguments": {...}}`, both in JSON, and `tool`
    is the call's result. A call belongs to the words of the `assistant` before it.
    """

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of an open turn: words of the policy, or text that was inserted in between.

    `token_ids` are the ids that the policy sampled, used as they are. If None, the text is encoded by
    itself, never merged with its neighbours.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    by_policy: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of a model: a chat, the open turn so far, and stop strings."""

    messages: tuple[Message, ...]
    turn: tuple[Span, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """The open turn so far, as text."""
        return "".join(span.text for span in self.turn)


class FinishReason(StrEnum):
    """Why a backend ended a completion: at its end, at a limit, or otherwise."""

    STOP = "stop"  # a stop string or the end token
    LENGTH = "length"  # max_tokens
    OTHER = "other"  # a content filter, an abort, an unnamed reason


def as_finite(value: object) -> float | None:
    """Return a foreign value as a float; None if it is not a number, not finite, or too large.

    >>> [as_finite(value) for value in (1, -0.5, 10**400, float("nan"), "1", True)]
    [1.0, -0.5, None, None, None, None]
    """
    if not isinstance(value, (float, int, Real)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Completion:
    """Output of a model. `text` includes the stop string that ended it.

    Attributes:
        token_ids: `[T]` as sampled (never decoded and encoded again), with the end token or the tokens of
            the stop string; None if the backend does not report them.
        logprobs: `[T]` natural logarithms at the sampling temperature over the full vocabulary, or None.
        prompt_token_ids: `[P]`, or None.
        prompt_tokens: count for cost; None if unknown.
        completion_tokens: likewise.
        cached_tokens: how many of the prompt's tokens the
            engine took from its prefix cache; None if unknown.
    """

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it ended at the token limit."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def is_whole(self) -> bool:
        """Whether the policy ended it, by a stop string or the end token."""
        return self.finish_reason is FinishReason.STOP


@dataclass(frozen=True, slots=True)
class Search:
    """The policy asks the retriever for passages on a query."""

    query: str


@dataclass(frozen=True, slots=True)
class Note:
    """The policy notes evidence from its passages; `evidence` may be empty."""

    evidence: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy answers; `forced` if the step limit left no other action."""

    answer: str
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Malformed:
    """A completion that the format cannot parse; `reason` is the short name under which it is counted.

    `ends` if no step can follow: in a growing turn, the policy ended the turn or ran out of tokens.
    """

    reason: str
    ends: bool = False


Action = Search | Note | Answer | Malformed


@dataclass(frozen=True, slots=True)
class Step:
    """One decision with its result: of the policy, or of the format, without a call (`Format.own_step`)."""

    prompt: Prompt
    completion: Completion
    action: Action
    passages: tuple[Passage, ...] = ()  # best first; empty unless the action is a Search

    @property
    def asked(self) -> bool:
        """Whether the policy was asked for it."""
        return bool(self.prompt.messages)


class StopReason(StrEnum):
    """Why a trajectory ended; only an answer can be scored."""

    ANSWERED = "answered"
    FORCED_ANSWER = "forced_answer"
    NO_ANSWER = "no_answer"  # the last step is not an answer


@dataclass(frozen=True, slots=True)
class Grade:
    """How good an answer is.

    Attributes:
        value: in [0, 1]; None if it is unknown, which is never 0.
        reason: in words; of an unknown value, the short name under which it is counted.
        error: standard error of the value, if it is the mean of several verdicts.
        calls: verdicts that a judge was asked for.
    """

    value: float | None
    reason: str = ""
    error: float = 0.0
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a question: the steps so far, and why it ended (None if unfinished).

    `grade` is that of its answer, if anything but token F1 grades it.
    """

    question: Question
    steps: tuple[Step, ...] = ()
    stop_reason: StopReason | None = None
    grade: Grade | None = field(default=None, compare=False)

    @property
    def answer(self) -> str | None:
        action = self.steps[-1].action if self.steps else None
        return action.answer if isinstance(action, Answer) else None

    @property
    def complete(self) -> bool:
        """Whether the trajectory ended with an answer; only then can it be scored."""
        return self.stop_reason is not None and self.answer is not None

    def extend(self, step: Step, stop_reason: StopReason | None = None) -> Trajectory:
        """Return a new trajectory with one more step."""
        return Trajectory(self.question, (*self.steps, step), stop_reason)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `of` parts of a run, counted from 0. A run that is not cut is the shard 0/1.

    >>> Shard.parse("2/8")
    Shard(number=2, of=8)
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `--shard I/S` names; raise ConfigError if it is not of that form with 0 <= I < S."""
        number, slash, of = text.partition("/")
        is_valid = slash and number.isdecimal() and of.isdecimal() and len(of) <= 5
        if not is_valid or int(number) >= int(of):
            raise ConfigError(f"--shard {text[:80]!r} is not I/S; the 8 shards of a run are 0/8, 1/8, ..., 7/8")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def folder(self, run: Path) -> Path:
        """Return where this shard of a run is built."""
        return run if self.of == 1 else run / "shards" / f"{self.number}-of-{self.of}"


WHOLE = Shard(0, 1)
