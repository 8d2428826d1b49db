"""The LLM protocol (a prompt in, a completion out, for policies and judges), and code that the backends share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from reasonrag.core.types import Completion, Prompt

_OVERFLOW = (
    r"context[_ ](?:length|size|window)|maximum (?:model|sequence|input) length|max_model_len|prompt is too long"
)
_BEGINS = {"</": "<", "<|end": "<|begin", "]": "["}  # what a stop string begins with, and what it closes


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request.

    Args:
        temperature: 0 is greedy decoding.
        top_p: nucleus mass in (0, 1].
        max_tokens: upper bound.
        seed: a backend that honours seeds gives the same text for
            the same prompt and seed. None lets the backend choose.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The question that a call of an `LLM` belongs to. It changes when and where a request is served, not its content.

    Args:
        question: data set and id in one text. Requests of a question
            share prompt prefixes, so they belong on one engine.
        priority: of two requests that wait, the one with the lower number is served first.
    """

    question: str = ""
    priority: int = 0


NOBODY = Caller()
caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
"""The caller of the current task and of the tasks that it starts."""


class Model(Protocol):
    """A model that many tasks may call at once."""

    @property
    def name(self) -> str:
        """The model's name in run identities and data sets: no URL, no local path, no secret."""

    async def aclose(self) -> None:
        """Release sockets, threads and memory. Calling it twice does no harm."""


class LLM(Model, Protocol):
    """A language model. Each backend bounds its concurrency and forms batches."""

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion of the prompt.

        Raises:
            LLMError: no answer after all retries, or the request was refused.
        """


class StepScorer(Model, Protocol):
    """Says what steps are worth before anything follows from them."""

    async def score(self, steps: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """Return `[n]` values in [0, 1], one per prompt and completion.

        Raises:
            LLMError: one of them could not be valued, as a failure is never a score.
        """


def restore_stop(text: str, stop: tuple[str, ...], prefix: str = "") -> str:
    """Append the closing tag at which a server stopped.

    OpenAI-compatible servers drop the stop string and rarely report
    which one it was. If `prefix + text` ends inside `<x>` and `</x>`
    is a stop string, that one is appended (likewise `<|begin|>` and
    `<|end|>`, `[` and `]`); otherwise `text` is returned as it is.

    >>> restore_stop("So the next query is <query>Jaws", ("</query>", "</answer>"))
    'So the next query is <query>Jaws</query>'
    >>> restore_stop("no tag here", ("</query>",))
    'no tag here'
    """
    innermost, innermost_start = "", -1
    whole = prefix + text
    for closing in stop:
        opening = _opening(closing)
        # Passages in the prefix have no tags left, but brackets:
        # one opens something only where the prefix ends.
        start = whole.rfind(opening, len(prefix) - 1 if opening == "[" and prefix else 0) if opening else -1
        if start > max(innermost_start, whole.rfind(closing)):
            innermost, innermost_start = closing, start
    return text + innermost


def _opening(closing: str) -> str:
    begins = (begin + closing[len(end) :] for end, begin in _BEGINS.items() if closing.startswith(end))
    return next(begins, "")


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Return `text` up to and including the stop string that is complete first, or None if it holds none.

    >>> cut_at_stop("<query>Jaws</query> and <answer>", ("</answer>", "</query>"))
    '<query>Jaws</query>'
    """
    ends = [text.find(mark) + len(mark) for mark in stop if mark and mark in text]
    return text[: min(ends)] if ends else None


def overflows_context(message: str) -> bool:
    """Return whether an error message reports that prompt and completion exceed the model's context.

    >>> overflows_context("This model's maximum context length is 512 tokens.")
    True
    """
    return re.search(_OVERFLOW, message, re.IGNORECASE) is not None
