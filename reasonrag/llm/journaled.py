"""An LLM whose every reply is on disk before anybody sees it, and is never paid for twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from reasonrag.core.secrets import redact_data
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import LLM, Sampling
from reasonrag.storage.journal import Journal


class JournaledLLM:
    """Wraps any LLM; replays what the journal has, keeps what it has not.

    A request is known by model, prompt and sampling, the seed included: two samples of one prompt have two seeds and
    stay two samples.

    A secret in a reply is taken out before it is kept or used: whoever reads it, in this run or after a kill, reads the
    same. Online training does not go through here with its policy, whose tokens are trained on as they were sampled;
    there it is taken out of what is written (`online_rl.record`).
    """

    def __init__(self, inner: LLM, journal: Journal, *, kind: str) -> None:
        """Wrap `inner`; `kind` ("policy", "judge") is what its calls are counted under."""
        self.inner = inner
        self.journal = journal
        self.kind = kind
        # Of this process; the totals over all processes are in the journal.
        self.sent = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    @property
    def name(self) -> str:
        """The inner model's."""
        return self.inner.name

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """The kept reply, or a new one that is kept first.

        Raises:
            LLMError: as the inner model does; nothing is kept then.
            Interrupted: the run is draining and the reply would have to be paid for.
        """
        key = request_key(self.inner.name, self.kind, prompt, sampling)
        if (kept := self.journal.call(key)) is not None:
            return tuple(map(_decode, kept))
        self.journal.admit()
        self.sent += 1
        completions = tuple(map(_without_secrets, await self.inner.complete(prompt, sampling)))
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
    """32 hex digits that identify a request."""
    request = json.dumps([model, kind, asdict(prompt), asdict(sampling)], ensure_ascii=True, sort_keys=True)
    return hashlib.blake2b(request.encode(), digest_size=16).hexdigest()


def _without_secrets(completion: Completion) -> Completion:
    """The completion redacted; then without its token ids, which spell the secret, and the logprobs, which are theirs.

    Formats encode the text anew where there are no ids, and trees and pairs take such a step as they take those of a
    backend that reports none.
    """
    text = redact_data(completion.text, "a reply")
    return completion if text is completion.text else replace(completion, text=text, token_ids=None, logprobs=None)


def _decode(kept: dict[str, Any]) -> Completion:
    ids = {name: _tuple(kept[name]) for name in ("token_ids", "logprobs", "prompt_token_ids")}
    return Completion(**{**kept, **ids, "finish_reason": FinishReason(kept["finish_reason"])})


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum of the known counts; None where none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
