"""The OpenAI wire format: prompt and sampling to a request body, a reply to completions. Pure, no sockets."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reasonrag.core.secrets import excerpt
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import Sampling, cut_at_stop, restore_stop

# vLLM takes the sampling defaults of the model's generation_config.json (top_k 20, repetition_penalty 1.05, ...) for
# whatever a request leaves out: then the samples do not come from the distribution that was asked for.
_VLLM_EXTRAS: Mapping[str, Any] = {
    "return_token_ids": True,
    "include_stop_str_in_output": True,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_DROPPABLE = ("seed", "stop", "top_p", "n", "logprobs", "max_tokens", *_VLLM_EXTRAS)
_UNSUPPORTED = re.compile(
    r"unknown|unrecogni[sz]ed|unsupported|not supported|does not support|unexpected|not permitted|extra_forbidden"
    r"|not allowed|not implemented",
    re.IGNORECASE,
)
_FINISH = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
}


# What the completions endpoint is given: a text, or the token ids themselves, which vLLM takes as they are.
Encode = Callable[[Prompt], str | Sequence[int]]

# math.isfinite and float() raise OverflowError for an integer beyond it, a comparison does not.
_LARGEST = sys.float_info.max


class BadReply(ValueError):
    """A reply with status 200 that holds no completions."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How one server is spoken to.

    Args:
        model: the name that the server knows it by.
        encode: prompt to text or token ids for the completions endpoint; None is the chat endpoint.
        vllm: whether to use vLLM's own fields.
        logprobs: whether to ask for logprobs.
        processed_logprobs: whether the server reports those of the distribution that it sampled from.
    """

    model: str
    encode: Encode | None = None
    vllm: bool = False
    logprobs: bool = False
    processed_logprobs: bool = False

    @property
    def route(self) -> str:
        """Under the base URL."""
        return "/chat/completions" if self.encode is None else "/completions"

    def body(self, prompt: Prompt, sampling: Sampling, dropped: Collection[str] = ()) -> dict[str, Any]:
        """The request, without the parameters in `dropped`."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "n": sampling.n,
        }
        if sampling.n == 1:
            del body["n"]
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if prompt.stop:
            body["stop"] = list(prompt.stop)
        if self.logprobs:
            # The number of alternatives: vLLM reports the sampled token without any.
            body["logprobs"] = True if self.encode is None else 0 if self.vllm else 1
        if self.vllm:
            body |= _VLLM_EXTRAS
        if "max_tokens" in dropped:  # OpenAI's reasoning models know it by another name only
            body["max_completion_tokens"] = sampling.max_tokens
        return {key: value for key, value in body.items() if key not in dropped} | self._prompt(prompt)

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if self.encode is not None:
            encoded = self.encode(prompt)
            if not isinstance(encoded, str):
                return {"prompt": list(encoded)}
            # A rendered chat begins with its own start token: vLLM would put a second one before it.
            extra = {"add_special_tokens": False} if self.vllm else {}
            return {"prompt": valid_unicode(encoded), **extra}
        messages = [{"role": m.role, "content": valid_unicode(m.content)} for m in prompt.messages]
        if not prompt.prefix:
            return {"messages": messages}
        messages.append({"role": "assistant", "content": valid_unicode(prompt.prefix)})
        return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    def completions(self, raw: bytes, prompt: Prompt, sampling: Sampling, sent: object = None) -> list[Completion]:
        """At most `n` completions; fewer where the server ignores `n`.

        `sent` is the request's `prompt`. Where that is ids, they are the prompt's ids, whether the server repeats them
        or not.

        The prompt's tokens are counted on the first of them, the completions' tokens by their ids where the server
        reports ids, else in equal parts, so that the sums are what the server reported.

        Raises:
            BadReply: not JSON, no choices in it, or the server read other ids than those it was sent.
        """
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadReply(f"the reply is not JSON: {readable(raw)!r}") from error
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices:
            raise BadReply(f"the reply has no choices: {readable(raw)!r}")
        shared_ids = _ids(reply.get("prompt_token_ids"))
        exact = self._exact_logprobs(sampling)
        found = [self._completion(choice, prompt, shared_ids, exact) for choice in choices[: sampling.n]]
        if isinstance(sent, list):
            found = [replace(c, prompt_token_ids=_same_ids(c.prompt_token_ids, sent)) for c in found]
        return _with_usage(found, reply.get("usage"))

    def _exact_logprobs(self, sampling: Sampling) -> bool:
        """Whether what the server reports is what `Completion` promises: full vocabulary, at the temperature."""
        if not self.logprobs:
            return False
        # Processed ones are of the distribution that was sampled from, and that is the nucleus where there is one;
        # others are taken before the temperature is applied.
        return sampling.top_p >= 1.0 if self.processed_logprobs else sampling.temperature in (0.0, 1.0)

    def _completion(
        self, choice: object, prompt: Prompt, prompt_ids: tuple[int, ...] | None, exact_logprobs: bool
    ) -> Completion:
        if not isinstance(choice, dict):
            raise BadReply("a choice of the reply is not an object")
        written = self._text(choice)
        finish_reason = _FINISH.get(str(choice.get("finish_reason")), FinishReason.OTHER)
        text = cut_at_stop(written, prompt.stop)
        overrun = text is not None and text != written  # the server ignored the stop strings: its ids go on after them
        if text is not None:
            finish_reason = FinishReason.STOP
        elif finish_reason is FinishReason.STOP:
            text = self._restored(written, choice, prompt)
        else:
            text = written
        token_ids = None if overrun else _ids(choice.get("token_ids"))
        logprobs = _logprobs(choice.get("logprobs")) if exact_logprobs and not overrun else None
        if token_ids is not None and logprobs is not None and len(token_ids) != len(logprobs):
            logprobs = None
        own_prompt_ids = _ids(choice.get("prompt_token_ids"))
        return Completion(text, finish_reason, token_ids, logprobs, own_prompt_ids or prompt_ids)

    def _text(self, choice: Mapping[str, Any]) -> str:
        if self.encode is not None:
            text = choice.get("text")
        else:
            message = choice.get("message")
            if not isinstance(message, dict):
                raise BadReply("a choice of the reply has no message")
            # A server with a reasoning parser may file everything under its own field, the answer tag included.
            text = message.get("content") or message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(text, str):
            raise BadReply(f"a choice of the reply has {type(text).__name__} where its text should be")
        return valid_unicode(text)

    @staticmethod
    def _restored(text: str, choice: Mapping[str, Any], prompt: Prompt) -> str:
        if "stop_reason" in choice:  # vLLM says which stop string it was; None or a number is an end token
            return text + choice["stop_reason"] if choice["stop_reason"] in prompt.stop else text
        return restore_stop(prompt.prefix + text, prompt.stop)[len(prompt.prefix) :]


def _count(value: object) -> int | None:
    """An id or a count that the journal and Parquet's int32 can hold: JSON's integers have no bound."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def _ids(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(_count(item) is not None for item in value):
        return tuple(value)
    return None


def _same_ids(read: tuple[int, ...] | None, sent: Sequence[int]) -> tuple[int, ...]:
    """The ids that were sent; a server that cut or extended them answered another prompt."""
    ids = tuple(sent)
    if read is not None and read != ids:
        raise BadReply(f"the server read {len(read)} token ids that are not the {len(ids)} it was sent")
    return ids


def _logprobs(value: object) -> tuple[float, ...] | None:
    """From `content[].logprob` (chat) or `token_logprobs` (completions)."""
    if not isinstance(value, dict):
        return None
    content = value.get("content")
    if isinstance(content, list):
        numbers = [item.get("logprob") if isinstance(item, dict) else None for item in content]
    else:
        numbers = value.get("token_logprobs")  # type: ignore[assignment]
    if isinstance(numbers, list) and all(type(x) in (int, float) and -_LARGEST <= x <= _LARGEST for x in numbers):
        return tuple(float(x) for x in numbers)
    return None


def _with_usage(found: list[Completion], usage: object) -> list[Completion]:
    counts = usage if isinstance(usage, dict) else {}
    prompt, written = _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))
    shares: list[int | None] = [None] * len(found)
    lengths = [len(c.token_ids) for c in found if c.token_ids is not None]
    if len(lengths) == len(found):
        shares = list(lengths)
    elif written is not None:
        share, rest = divmod(written, len(found))
        shares = [share + (index < rest) for index in range(len(found))]
    prompts: list[int | None] = [None] * len(found)
    if prompt is not None:
        prompts = [prompt, *([0] * (len(found) - 1))]
    return [replace(c, prompt_tokens=p, completion_tokens=s) for c, p, s in zip(found, prompts, shares, strict=True)]


def rejected_parameter(raw: bytes, body: Mapping[str, Any]) -> str | None:
    """The optional parameter of `body` that a strict server says it does not know, or None."""
    message = raw.decode("utf-8", "replace")
    if not _UNSUPPORTED.search(message):
        return None
    named = (key for key in _DROPPABLE if key in body and re.search(rf"(?:['\"`]|\w: ){key}(?!\w)", message))
    return next(named, None)


def readable(raw: bytes, secret: str | None = None, *, limit: int = 200) -> str:
    """The message of an error body: at most `limit` printable characters on one line, without `secret` or any other."""
    text = raw.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        text = _message(json.loads(text)) or text
    if secret:
        text = text.replace(secret, "***")
    return excerpt(text, limit)


def _message(reply: object) -> str | None:
    """OpenAI's `error.message`, FastAPI's `detail`, or whatever stands for it."""
    if not isinstance(reply, dict):
        return None
    for key in ("error", "message", "detail"):
        value = reply.get(key)
        if isinstance(value, dict):
            return _message(value) or json.dumps(value)
        if value:
            return value if isinstance(value, str) else json.dumps(value)
    return None
