"""A trajectory as tokens: the ids that the policy sampled, what was put in between, and which is which.

Nothing is decoded and encoded again. The policy's ids are those that it sampled; a text that the engine put in is
encoded by itself, exactly as it was when the policy read it. So the log-probability that a trainer computes is that of
the very tokens that were sampled, after the very tokens that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reasonrag.core.types import FinishReason, Prompt, Span, Step, Trajectory


class Encoding(Protocol):
    """The tokenizer's side of a prompt (`llm.chat_template.ChatTemplate`)."""

    def chat_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the chat, up to where the policy's turn opens."""
        ...

    def span_ids(self, span: Span) -> tuple[int, ...]:
        """Ids of a piece of the open turn."""
        ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """One trajectory of an append-only format as a training row.

    `completion_ids`, `mask` and `logprobs` are `[T]`: mask is 1 where the policy sampled the token and 0 where it was
    put in; logprobs are natural logarithms at the sampling temperature, 0.0 where the mask is 0. `prompt_ids` are
    `[P]`: the chat, and what was put in before the policy's first token. `truncated` says that the policy ran out of
    tokens.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    truncated: bool

    def ended(self, end_id: int) -> Transcript:
        """With a masked end token, unless it was truncated or ends with that token anyway.

        An episode ends with a stop string, not with the end token: a trainer would take it for truncated.
        """
        if self.truncated or (self.completion_ids and self.completion_ids[-1] == end_id):
            return self
        logprobs = None if self.logprobs is None else (*self.logprobs, 0.0)
        return Transcript(self.prompt_ids, (*self.completion_ids, end_id), (*self.mask, 0), logprobs, False)


def transcript(trajectory: Trajectory, encoding: Encoding) -> Transcript:
    """The tokens of a trajectory in an append-only format.

    Raises:
        ValueError: it has no steps, its prompts do not extend each other, or a backend reported no token ids.
    """
    if not trajectory.steps:
        raise ValueError("a trajectory without steps has no tokens")
    last = trajectory.steps[-1]
    _check_grows(trajectory.steps)
    turn = (*last.prompt.turn, Span(last.completion.text, last.completion.token_ids, by_policy=True))
    first = next(place for place, span in enumerate(turn) if span.by_policy)
    prompt_ids = [*encoding.chat_ids(last.prompt), *(t for span in turn[:first] for t in encoding.span_ids(span))]
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
    """Each prompt has to begin with all that came before it: else one row would hold another text than was read."""
    said: tuple[Span, ...] = ()
    for step in steps:
        turn = step.prompt.turn
        if step.prompt.messages != steps[0].prompt.messages or turn[: len(said)] != said:
            raise ValueError("the prompts of this format do not extend each other, so a trajectory is no single row")
        own = Span(step.completion.text, step.completion.token_ids, by_policy=True)
        said = (*turn, own) if own.text or own.token_ids else turn


def _logprobs(steps: Sequence[Step], mask: Sequence[int]) -> tuple[float, ...] | None:
    """Spread over the policy's tokens; None where a backend reported none, or not one a token."""
    reported = [step.completion.logprobs for step in steps]
    if any(found is None for found in reported):
        return None
    flat = iter([value for found in reported for value in found or ()])
    if sum(len(found or ()) for found in reported) != sum(mask):
        return None
    return tuple(next(flat) if own else 0.0 for own in mask)
