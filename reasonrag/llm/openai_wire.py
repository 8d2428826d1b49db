"""The OpenAI wire format: request bodies from prompts, completions from replies. Pure functions, no sockets."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import structlog

from reasonrag.core.text import MOST_QUOTED, excerpt, valid_unicode
from reasonrag.core.types import Completion, FinishReason, Message, Prompt, as_finite
from reasonrag.llm.base import Sampling, cut_at_stop, restore_stop
from reasonrag.llm.chat_template import chat_with_tools

log = structlog.get_logger()

# For parameters that a request omits, vLLM takes the defaults in
# the model's generation_config.json (top_k 20, repetition_penalty
# 1.05, ...): the samples would come from a different distribution.
_VLLM_EXTRAS: Mapping[str, Any] = {
    "return_token_ids": True,
    "include_stop_str_in_output": True,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_DROPPABLE = ("seed", "stop", "top_p", "logprobs", "max_tokens", *_VLLM_EXTRAS)
_UNSUPPORTED = re.compile(
    r"unknown|unrecogni[sz]ed|unsupported|not supported|does not support|unexpected|not permitted|extra_forbidden"
    r"|not allowed|not implemented|not enabled",
    re.IGNORECASE,
)
_FINISH = {"length": FinishReason.LENGTH, "max_tokens": FinishReason.LENGTH}
_FINISH |= dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "tool_calls"), FinishReason.STOP)
# By the server: not what the policy would say.
_BROKEN_OFF = ("error", "abort", "cancelled", "content_filter")

Encoded = str | Sequence[int] | None
# From prompt to the input of the completions endpoint:
# a text, or token ids, which vLLM takes as they are.
Encode = Callable[[Prompt], str | Sequence[int]]

MOST_TOKENS = 1 << 24
"""No vocabulary and no prompt has more tokens; a larger id or count of a server is discarded."""

_MESSAGES = ("error", "message", "detail")  # where servers put an error's message
_ROUNDING = 1e-3  # by which the logarithm of a probability may exceed 0, in half precision


class BadReply(ValueError):
    """A reply with status 200 lacks the requested content."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of a server's list of models."""

    name: str
    root: str  # the folder or Hub id that it was loaded from, of an adapter too; "" if the server does not report it
    is_vllm: bool
    context: int | None  # the most tokens of a prompt and its completion; None if the server does not report it


@dataclass(frozen=True, slots=True)
class Wire:
    """The wire format of one server; the fields are those of `ServerLLM`. Without `encode`, it is the chat endpoint.

    A reply is refused if its text cannot be used. Token ids that the
    model cannot have, log-probabilities above 0 or not finite, and
    counts that cannot be are set aside: the completion has none.
    """

    model: str
    encode: Encode | None = None
    vllm: bool = False
    logprobs: bool = False
    processed_logprobs: bool = False
    think: bool | None = None
    vocabulary: int = MOST_TOKENS
    served: list[str] = field(default_factory=list)  # names of the models in replies, at most two

    def body(
        self, prompt: Prompt, encoded: Encoded, sampling: Sampling, dropped: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the body of a request, without the parameters in `dropped`.

        `encoded` is what `encode` makes of the prompt; None for the chat endpoint.
        """
        parameters: dict[str, Any] = {"model": self.model, **asdict(sampling), "stop": list(prompt.stop) or None}
        if self.logprobs:
            # The number is that of alternatives; vLLM reports the sampled token even with 0.
            parameters["logprobs"] = True if self.encode is None else 0 if self.vllm else 1
        if self.vllm:
            # Stop strings stay in the text, so that text and token ids end at the same place.
            parameters |= _VLLM_EXTRAS
            if not prompt.stop:  # else, with functions offered, the text would hold the end token
                del parameters["include_stop_str_in_output"]
        if "max_tokens" in dropped:  # OpenAI's reasoning models accept this name only
            parameters["max_completion_tokens"] = sampling.max_tokens
        sent = {key: value for key, value in parameters.items() if value is not None and key not in dropped}
        return sent | self._prompt(prompt, encoded)

    def most_bytes(self, sent: int, sampling: Sampling) -> int:
        """Return how long a reply can be to a request of `sent` bytes: several times what its tokens take as JSON.

        The reply may repeat the prompt as token ids.
        """
        per_token = 1024 if self.logprobs else 256
        return (1 << 20) + 8 * sent + per_token * sampling.max_tokens

    def _prompt(self, prompt: Prompt, encoded: Encoded) -> dict[str, Any]:
        if encoded is not None:
            # A rendered chat begins with its start token; vLLM would add a second one.
            if isinstance(encoded, str):
                return {"prompt": valid_unicode(encoded)} | ({"add_special_tokens": False} if self.vllm else {})
            return {"prompt": list(encoded)}
        chat = chat_with_tools(prompt.messages, as_sent=True)
        if self.think is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": self.think}
        if not prompt.prefix:
            return chat
        chat["messages"].append({"role": "assistant", "content": valid_unicode(prompt.prefix)})
        return chat | {"continue_final_message": True, "add_generation_prompt": False}

    def completion(self, payload: bytes, prompt: Prompt, sampling: Sampling, sent: object = None) -> Completion:
        """Parse the first completion of a reply.

        Its tokens are counted by its ids, or, if the server reports no
        ids, by its usage. `sent` is the field `prompt` of the request;
        ids in it are the prompt's ids, even if the server reports none.

        Raises:
            BadReply: the reply is not JSON, has no choices, or
                reports other prompt ids than the request had.
        """
        reply: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            reply = json.loads(payload)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices:
            raise BadReply(f"the reply is not JSON with choices: {readable(payload)!r}")
        if not isinstance(choices[0], dict):
            raise BadReply("a choice of the reply is not an object")
        if isinstance(name := reply.get("model"), str) and len(self.served) < 2 and name not in self.served:
            self.served.append(readable(name.encode()))
            if len(self.served) == 2:  # a gateway, perhaps, whose first choice is down
                log.warning("another model answers than before", before=self.served[0], now=self.served[1])
        completion = self._sampled(choices[0], prompt, sampling)
        read = choices[0].get("prompt_token_ids") or reply.get("prompt_token_ids")
        prompt_ids = tuple(sent) if isinstance(sent, list) else self._ids(read)
        if isinstance(sent, list) and read != sent and (others := self._ids(read)) is not None:
            # The server has answered a different prompt.
            raise BadReply(f"the server read {len(others)} token ids that differ from the {len(sent)} of the request")
        usage = reply["usage"] if isinstance(reply.get("usage"), dict) else {}
        names = ("prompt_tokens", "completion_tokens")
        counts: dict[str, Any] = {name: _count(usage.get(name)) for name in names}
        if completion.token_ids is not None:
            counts["completion_tokens"] = len(completion.token_ids)
        return replace(completion, prompt_token_ids=prompt_ids, **counts)

    def _sampled(self, choice: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> Completion:
        if choice.get("error") or choice.get("finish_reason") in _BROKEN_OFF:
            raise BadReply(f"the server broke off its reply ({readable(str(choice.get('finish_reason')).encode())})")
        completion_tokens = self._text(choice)
        finish_reason = _FINISH.get(str(choice.get("finish_reason")), FinishReason.OTHER)
        text = cut_at_stop(completion_tokens, prompt.stop)
        if text is not None and text != completion_tokens:  # the server ignored the stop strings, and its ids continue
            return Completion(text)
        if text is not None:
            finish_reason = FinishReason.STOP
        elif finish_reason is FinishReason.STOP and "stop_reason" in choice:
            # vLLM reports the stop string; None or a number is an end token.
            completion_tokens += choice["stop_reason"] if choice["stop_reason"] in prompt.stop else ""
        elif finish_reason is FinishReason.STOP:
            completion_tokens = restore_stop(completion_tokens, prompt.stop, prompt.prefix)
        token_ids, logprobs = self._ids(choice.get("token_ids")), None
        # Logprobs have to be those of the full vocabulary at the temperature. Processed ones are
        # normalised over the nucleus; others are from before the temperature is applied.
        if sampling.top_p >= 1.0 if self.processed_logprobs else sampling.temperature in (0.0, 1.0):
            logprobs = _logprobs(choice.get("logprobs")) if self.logprobs else None
        # Some servers count the end token in one of the two
        # only: then it is unknown which belongs to which.
        if token_ids is not None and logprobs is not None and len(token_ids) != len(logprobs):
            logprobs = None
        return Completion(completion_tokens, finish_reason, token_ids, logprobs)

    def _ids(self, value: object) -> tuple[int, ...] | None:
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            return None
        return tuple(value) if not value or (min(value) >= 0 and max(value) < self.vocabulary) else None

    def _text(self, choice: Mapping[str, Any]) -> str:
        if self.encode is not None:
            return _string(choice.get("text"))
        message = choice.get("message")
        if not isinstance(message, dict):
            raise BadReply("a choice of the reply has no message")
        # A reasoning parser may put everything into a separate field, including the answer tag.
        text = _string(message.get("content") or message.get("refusal") or "")
        thought = _string(message.get("reasoning_content") or message.get("reasoning") or "")
        if calls := _written_calls(message.get("tool_calls")):
            thought = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            text = f"{thought}{text.rstrip()}\n{calls}".lstrip("\n")
        # A thought that was cut off holds drafts, and no step.
        return text or ("" if _FINISH.get(str(choice.get("finish_reason"))) is FinishReason.LENGTH else thought)


def _string(value: object) -> str:
    # A list of parts would be content of another kind than text.
    if not isinstance(value, str):
        raise BadReply(f"a choice of the reply has {type(value).__name__} where its text should be")
    return valid_unicode(value)


def messages_of(request: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages and functions of a client's request as ours: `chat_with_tools` the other way.

    >>> request = {"messages": [{"role": "developer", "content": "Search."}, {"role": "user", "content": "Who?"}]}
    >>> [message.role for message in messages_of(request)]
    ['system', 'user']
    """
    tools = request.get("tools")
    messages = [Message("tools", json.dumps(tools, ensure_ascii=False))] if tools else []
    for message in request["messages"]:
        role, content = message["role"], message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)  # an image cannot be sent
        if content or role != "assistant":
            messages.append(Message("system" if role == "developer" else role, valid_unicode(content)))
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
            messages.append(Message("call", json.dumps(call, ensure_ascii=False)))
    return tuple(messages)


def _written_calls(calls: Any) -> str:
    """Return the calls that a server found in a reply as Hermes and Qwen write them, arguments as they are."""
    written_calls = []
    try:
        for function in (call["function"] for call in calls or ()):
            arguments = function["arguments"].replace("</", r"<\/")  # the same in JSON, and no end of the call
            written_calls.append(
                f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
            )
    except (LookupError, TypeError, AttributeError) as error:
        raise BadReply("a choice of the reply has calls that are not as OpenAI writes them") from error
    return "\n".join(written_calls)


def listed_models(payload: bytes) -> dict[str, ServedModel]:
    """Parse the reply of `GET /models`; return the models by name.

    Raises:
        BadReply: the reply is not a list of models.
    """
    try:
        cards = {str(card["id"]): card for card in json.loads(payload)["data"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadReply(readable(payload)) from error
    models = {}
    for name, card in cards.items():
        base_card = cards.get(str(card.get("parent")), card)  # an adapter has the context of its base
        context, is_vllm = _count(base_card.get("max_model_len")), card.get("owned_by") == "vllm"
        models[name] = ServedModel(name, str(card.get("root") or ""), is_vllm, context)
    return models


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _logprobs(value: object) -> tuple[float, ...] | None:
    """Return the logprobs in `content[].logprob` (chat) or `token_logprobs` (completions), or None."""
    reported = value if isinstance(value, dict) else {}
    numbers, tokens = reported.get("token_logprobs"), reported.get("content")
    if isinstance(tokens, list):
        numbers = [token.get("logprob") if isinstance(token, dict) else None for token in tokens]
    if not isinstance(numbers, list):
        return None
    logprobs = [number for number in map(as_finite, numbers) if number is not None and number <= _ROUNDING]
    return tuple(logprobs) if len(logprobs) == len(numbers) else None


def rejected_parameter(payload: bytes, parameters: Mapping[str, Any]) -> str | None:
    """Return the optional parameter of `body` that a strict server does not know, or None."""
    message = payload.decode("utf-8", "replace")
    sent = [key for key in _DROPPABLE if key in parameters] if _UNSUPPORTED.search(message) else []
    return next((key for key in sent if re.search(rf"(?:['\"`]|\w: |Got ){key}(?!\w)", message)), None)


def readable(payload: bytes, secret: str | None = None, *, limit: int = 200) -> str:
    """Return the message in an error body (OpenAI's `error.message`, FastAPI's `detail`) as an `excerpt`.

    `secret` is masked.
    """
    text = payload[:MOST_QUOTED].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text)
        while isinstance(message, dict) and any(map(message.get, _MESSAGES)):
            message = next(filter(None, map(message.get, _MESSAGES)))
        text = message if isinstance(message, str) else json.dumps(message)
    if secret:
        text = text.replace(secret, "***")
    return excerpt(text, limit)
