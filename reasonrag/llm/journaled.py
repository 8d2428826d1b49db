"""An LLM that stores every reply in the run's journal before returning it, and never pays for a reply twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from reasonrag.core.secrets import redact_data
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import LLM, Sampling
from reasonrag.llm.slots import Slots
from reasonrag.storage.journal import Journal


class JournaledLLM:
    """Wraps any LLM: replays the replies in the journal, and stores the others there.

    A request is identified by model, prompt and sampling, including the seed: two samples of one prompt have two seeds
    and stay two samples.

    Secrets in a reply are replaced before it is stored or used, so that a resumed run reads the same text. The policy
    of online training does not pass through here, as it is trained on its tokens as sampled; its secrets are replaced
    when rollouts are written (`online_rl.rollout_log`).
    """

    def __init__(self, inner: LLM, journal: Journal, *, kind: str) -> None:
        """Wrap `inner`; its calls are counted under `kind` ("policy" or "judge")."""
        self.inner = inner
        self.journal = journal
        self.kind = kind
        # Totals of this process; the totals of the whole run are in the journal.
        self.sent = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def slots(self) -> Slots | None:
        """The inner engine's requests in flight; None if it does not bound them."""
        return getattr(self.inner, "slots", None)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Return the stored reply, or ask for one and store it first.

        Raises:
            LLMError: raised by the inner model; nothing is stored.
            Interrupted: the run is shutting down, and the journal does not hold the reply.
        """
        key = request_key(self.inner.name, self.kind, prompt, sampling)
        stored = self.journal.call(key)
        if stored is not None:
            return tuple(_decode(completion) for completion in stored)
        self.journal.admit()
        self.sent += 1
        reply = await self.inner.complete(prompt, sampling)
        completions = tuple(_without_secrets(completion) for completion in reply)
        prompt_tokens = _total(c.prompt_tokens for c in completions)
        completion_tokens = _total(c.completion_tokens for c in completions)
        self.prompt_tokens += prompt_tokens or 0
        self.completion_tokens += completion_tokens or 0
        await self.journal.put_call(
            key,
            self.kind,
            [asdict(c) for c in completions],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return completions

    async def aclose(self) -> None:
        """Close the inner model; the journal stays open."""
        await self.inner.aclose()


def request_key(model: str, kind: str, prompt: Prompt, sampling: Sampling) -> str:
    """Return 32 hex digits that identify a request."""
    request = json.dumps([model, kind, asdict(prompt), asdict(sampling)], ensure_ascii=True, sort_keys=True)
    return hashlib.blake2b(request.encode(), digest_size=16).hexdigest()


def _without_secrets(completion: Completion) -> Completion:
    """Return the completion without secrets; a changed one loses its token ids, which spell the secret, and logprobs.

    Formats then encode the text, as they do for a backend that reports no ids.
    """
    text = redact_data(completion.text, "a reply")
    return completion if text is completion.text else replace(completion, text=text, token_ids=None, logprobs=None)


def _decode(stored: dict[str, Any]) -> Completion:
    fields = stored | {"finish_reason": FinishReason(stored["finish_reason"])}
    for name in ("token_ids", "logprobs", "prompt_token_ids"):
        if fields[name] is not None:
            fields[name] = tuple(fields[name])
    return Completion(**fields)


def _total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the known counts, or None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
