"""A trajectory as tokens: the ids that the policy sampled, the inserted texts between them, and a mask.

Nothing is decoded and encoded again. The policy's ids are the sampled ones; each inserted text is encoded by itself, as
it was when the policy read it. So a trainer's log-probabilities are for exactly the tokens that were sampled, after
exactly the tokens that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reasonrag.core.types import FinishReason, Prompt, Span, Step, Trajectory


class Encoding(Protocol):
    """The tokenizer's side of a prompt (`llm.chat_template.ChatTemplate`)."""

    def chat_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of the chat, up to the start of the policy's turn."""
        ...

    def span_ids(self, span: Span) -> tuple[int, ...]:
        """Return the ids of a piece of the open turn."""
        ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """One trajectory of an append-only format as a training row.

    `completion_ids`, `mask` and `logprobs` are `[T]`: the mask is 1 for sampled and 0 for inserted tokens; logprobs are
    natural logarithms at the sampling temperature, 0.0 where the mask is 0. `prompt_ids` are `[P]`: the chat, and the
    text inserted before the policy's first token. `truncated` means that the policy reached a token limit.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    truncated: bool

    def ended(self, end_id: int) -> Transcript:
        """Append a masked end token, unless the transcript is truncated or ends with that token already.

        An episode ends with a stop string, not with the end token: a trainer would count it as truncated.
        """
        if self.truncated or (self.completion_ids and self.completion_ids[-1] == end_id):
            return self
        logprobs = None if self.logprobs is None else (*self.logprobs, 0.0)
        return Transcript(self.prompt_ids, (*self.completion_ids, end_id), (*self.mask, 0), logprobs, False)


def transcript(trajectory: Trajectory, encoding: Encoding) -> Transcript:
    """Return the tokens of a trajectory in an append-only format.

    Raises:
        ValueError: it has no steps, its prompts do not extend each other, or a backend reported no token ids.
    """
    if not trajectory.steps:
        raise ValueError("a trajectory without steps has no tokens")
    last = trajectory.steps[-1]
    _check_grows(trajectory.steps)
    turn = (*last.prompt.turn, Span(last.completion.text, last.completion.token_ids, by_policy=True))
    first = next(index for index, span in enumerate(turn) if span.by_policy)
    prompt_ids = list(encoding.chat_ids(last.prompt))
    for span in turn[:first]:
        prompt_ids += encoding.span_ids(span)
    ids: list[int] = []
    mask: list[int] = []
    for span in turn[first:]:
        if span.by_policy and span.token_ids is None:
            raise ValueError("the policy's backend reports no token ids, and its text must not be encoded again")
        new = encoding.span_ids(span)
        ids += new
        mask += [int(span.by_policy)] * len(new)
    return Transcript(
        tuple(prompt_ids),
        tuple(ids),
        tuple(mask),
        _logprobs(trajectory.steps, mask),
        last.completion.finish_reason is FinishReason.LENGTH,
    )


def _check_grows(steps: Sequence[Step]) -> None:
    """Raise if a prompt does not begin with everything before it: one row would differ from what the policy read."""
    before: tuple[Span, ...] = ()
    for step in steps:
        turn = step.prompt.turn
        if step.prompt.messages != steps[0].prompt.messages or turn[: len(before)] != before:
            raise ValueError("the prompts of this format do not extend each other, so a trajectory is no single row")
        sampled = Span(step.completion.text, step.completion.token_ids, by_policy=True)
        before = (*turn, sampled) if sampled.text or sampled.token_ids else turn


def _logprobs(steps: Sequence[Step], mask: Sequence[int]) -> tuple[float, ...] | None:
    """Return the log-probabilities at the sampled tokens; None if a backend did not report one for each."""
    reported: list[float] = []
    for step in steps:
        if step.completion.logprobs is None:
            return None
        reported += step.completion.logprobs
    if len(reported) != sum(mask):
        return None
    remaining = iter(reported)
    return tuple(next(remaining) if sampled else 0.0 for sampled in mask)
