"""An LLM that stores every reply in the run's journal before returning it, and never pays for a reply twice."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from array import array
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from reasonrag.core.calls import Request, SlotCounts, Slots, answered
from reasonrag.core.errors import LLMError
from reasonrag.core.text import redact_data
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import LLM, Sampling, caller
from reasonrag.storage.journal import Journal

# Fields that are stored as base64 of an array of int32 or float32: a quarter of their JSON.
_PACKED = {"token_ids": "i", "logprobs": "f"}
_STORED = ("text", "finish_reason", *_PACKED, "prompt_tokens", "completion_tokens")
_WITHOUT_SLOTS = 32  # requests in flight, if neither engine nor settings limit them


class JournaledLLM:
    """Wraps any LLM: replays the replies in the journal, and stores the others there.

    A request is identified by model, prompt and sampling, including the seed: two samples of one prompt
    have two seeds and stay two samples. A greedy policy draws no sample and gets one request. A judge's
    seed counts: each retry has its own.

    Secrets in a reply are replaced before it is stored or used, so that a
    resumed run reads the same text. The policy of online training does not
    pass through here, as it is trained on its tokens as sampled; its
    secrets are replaced when rollouts are written (`online_rl.collector`).

    A completion has the values that are stored, so that a resumed run goes on from the same ones:
    log-probabilities in single precision, and no ids of the prompt, which are the most of what vLLM
    reports and which nothing reads.
    """

    def __init__(self, inner: LLM, journal: Journal, *, kind: str, concurrency: int | None = None) -> None:
        """Wrap `inner`; its calls are counted under `kind` ("policy", "completer" or "judge").

        `concurrency` bounds the requests in flight, if `inner` has no slots that do.
        """
        self.inner, self.name = inner, inner.name
        self.decode = getattr(inner, "decode", None)
        self.slots: SlotCounts = getattr(inner, "slots", None) or Slots(concurrency or _WITHOUT_SLOTS)
        self._own = self.slots.request if getattr(inner, "slots", None) is None else nullcontext
        self.journal = journal
        journal.at_drain.append(self.slots.drain)  # calls that were not sent yet are not in flight
        self.kind = kind
        # Totals of this process; the totals of the whole run are in the journal.
        self.answered = self.prompt_tokens = self.completion_tokens = 0

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return the stored reply, or ask for one and store it first.

        Raises:
            LLMError: raised by the inner model; nothing is stored.
            Interrupted: the run is shutting down, and the journal does not hold the reply.
        """
        # A policy's seeds differ by question. A judge may be
        # asked the same about two of them, and is asked once.
        question = caller.get().question if self.kind != "judge" else ""
        is_greedy = self.kind != "judge" and sampling.temperature == 0
        keyed_sampling = replace(sampling, seed=None) if is_greedy else sampling
        key = request_key(self.inner.name, self.kind, prompt, keyed_sampling)
        if (known := self.journal.call(key, question)) is not None:
            return _decode(known[0])
        self.journal.admit()
        # A request keeps its slot until its reply is on disk: no
        # more calls than slots are ever paid for and not kept.
        answered_requests: list[Request] = []
        token = answered.set(answered_requests)
        try:
            async with self._own(caller.get().priority):
                try:
                    reply = await self.inner.complete(prompt, sampling)
                except asyncio.CancelledError:
                    if (task := asyncio.current_task()) is None or task.cancelling():
                        raise
                    # No one cancelled this task, so a plug-in raised it.
                    raise LLMError(f"{self.name} raised CancelledError", cause="bug:CancelledError") from None
            self.answered += 1
            self.prompt_tokens += reply.prompt_tokens or 0
            self.completion_tokens += reply.completion_tokens or 0
            stored = _encode(reply)
            tokens = reply.prompt_tokens, reply.completion_tokens
            await self.journal.put_call(key, self.kind, [stored], question=question, tokens=tokens)
            return _decode(stored)  # as a resumed run reads it
        finally:
            answered.reset(token)
            for request in answered_requests:
                request.slots.leave(request, None)

    async def aclose(self) -> None:
        """Close the inner model; the journal stays open."""
        await self.inner.aclose()


def request_key(model: str, kind: str, prompt: Prompt, sampling: Sampling) -> str:
    """Return 32 hex digits that identify a request."""
    # The lengths say where each text ends, so no two requests have the same content. The
    # 1 is the number of completions, which is part of the keys of journals that exist.
    shape = (
        *(model, kind, 1, sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed),
        prompt.stop,
        [(message.role, len(message.content)) for message in prompt.messages],
        [(len(span.text), span.token_ids, span.by_policy) for span in prompt.turn],
    )
    texts = [ascii(shape), *(message.content for message in prompt.messages), *(span.text for span in prompt.turn)]
    return hashlib.blake2b("".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _encode(completion: Completion) -> dict[str, Any]:
    """Return the fields to store that are not None, without secrets, numbers packed.

    A text with a secret loses its token ids, which spell the secret, and logprobs. Formats then encode
    the text, as they do for a backend that reports no ids.
    """
    fields = {name: getattr(completion, name) for name in _STORED}
    fields["text"] = redact_data(completion.text, "a reply")
    if fields["text"] is not completion.text:
        fields |= dict.fromkeys(_PACKED)
    stored_fields = {name: value for name, value in fields.items() if value is not None}
    for name in _PACKED.keys() & stored_fields.keys():
        stored_fields[name] = binascii.b2a_base64(array(_PACKED[name], stored_fields[name]), newline=False).decode()
    return stored_fields


def _decode(stored: dict[str, Any]) -> Completion:
    fields = stored | {"finish_reason": FinishReason(stored["finish_reason"])}
    for name in _PACKED.keys() & fields.keys():
        fields[name] = tuple(array(_PACKED[name], binascii.a2b_base64(fields[name])))
    return Completion(**fields)
