"""The values that every room speaks in: frozen, slotted, compared by equality.

Branches of a tree share a prefix of steps safely, because nothing here can change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its gold answers (FlashRAG's fields, plus the name of the data set it came from).

    `metadata` is carried through untouched; it is never shown to a policy.
    """

    id: str
    question: str
    golden_answers: tuple[str, ...]
    dataset: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text. `contents` is FlashRAG's field: the title, a newline, the text."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        """The first of several lines, without the quotation marks of Search-R1's Wikipedia; "" of a single line."""
        head, newline, _ = self.contents.partition("\n")
        return head.strip().strip('"') if newline else ""

    @property
    def text(self) -> str:
        """Everything after the title; the whole contents where there is only one line."""
        head, newline, rest = self.contents.partition("\n")
        return rest.strip() if newline else head.strip()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of an open turn: words of the policy, or text that was put in between them.

    `token_ids` are the ids that the policy sampled, to be used as they are; None has the text encoded, by itself and
    never across the border to its neighbours.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    by_policy: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked: a chat, the turn so far if it is already open, and where to stop."""

    messages: tuple[Message, ...]
    turn: tuple[Span, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """The open turn as text."""
        return "".join(span.text for span in self.turn)


class FinishReason(StrEnum):
    """Why a backend stopped writing."""

    STOP = "stop"  # a stop string or the end token
    LENGTH = "length"  # max_tokens
    OTHER = "other"  # a content filter, an abort, a reason that the server did not name


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote. `text` includes the stop string that ended it.

    `token_ids` and `logprobs` are `[T]` and exactly what was sampled (never decoded and encoded again), the end token
    or the tokens of the stop string included; `prompt_token_ids` is `[P]`. All three are None where the backend does
    not report them. `logprobs` are natural logarithms at the sampling temperature over the full vocabulary.
    `prompt_tokens` and `completion_tokens` are counts for cost; None where unknown.
    """

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """The policy asks for passages."""

    query: str


@dataclass(frozen=True, slots=True)
class Note:
    """The policy writes down what it found; `evidence` is empty where it found nothing."""

    evidence: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy answers. `forced` if it was given no other choice, at the step limit."""

    answer: str
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Malformed:
    """A completion that the format cannot read; `reason` is a short name to count by.

    `ends` where nothing can follow it: in a turn that grows, the policy has ended the turn or run out of tokens.
    """

    reason: str
    ends: bool = False


Action = Search | Note | Answer | Malformed


@dataclass(frozen=True, slots=True)
class Step:
    """One decision of the policy and what it got back."""

    prompt: Prompt
    completion: Completion
    action: Action
    passages: tuple[Passage, ...] = ()  # best first; empty unless the action is a Search


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    FORCED_ANSWER = "forced_answer"
    NO_ANSWER = "no_answer"  # the last step allowed, or one after which nothing can follow, is no answer


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a question: the steps so far, and why it ended if it did."""

    question: Question
    steps: tuple[Step, ...] = ()
    stop_reason: StopReason | None = None

    @property
    def answer(self) -> str | None:
        """The final answer, or None while there is none."""
        if self.steps and isinstance(self.steps[-1].action, Answer):
            return self.steps[-1].action.answer
        return None

    @property
    def complete(self) -> bool:
        """Whether it ended with an answer: only these can be scored."""
        return self.stop_reason is not None and self.answer is not None

    def extend(self, step: Step, stop_reason: StopReason | None = None) -> Trajectory:
        """A new trajectory with one more step."""
        return replace(self, steps=(*self.steps, step), stop_reason=stop_reason)
