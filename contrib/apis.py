"""Calls of three APIs as chat completions: these, OpenAI's Responses and Anthropic's Messages, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from reasonrag.core.text import parse_json

Row = dict[str, Any]

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


class Api(NamedTuple):
    """How an API writes down what a chat completion is."""

    request: Callable[[Row], Row]
    replies: Callable[[Row], list[Row]]  # `message`, `finish_reason` and `usage` of each choice
    whole: Callable[[Iterable[Row]], Row]  # a reply from the events of its stream


def parse_replies(api: Api, raw: bytes) -> list[Row]:
    r"""Return `message`, `finish_reason` and `usage` of each choice of a reply, streamed or not.

    >>> events = '{"choices": [{"delta": {"content": "<answer>"}}]}', '{"choices": [{"delta": {"content": "Jaws"}}]}'
    >>> raw = "".join(f"data: {event}\n\n" for event in events)
    >>> [reply["message"] for reply in parse_replies(APIS["/chat/completions"], raw.encode())]
    [{'role': 'assistant', 'content': '<answer>Jaws'}]
    """
    return api.replies(parse_json(raw) if raw.lstrip().startswith(b"{") else api.whole(_events(raw)))


def _events(raw: bytes) -> Iterator[Row]:
    for line in raw.decode("utf-8", "replace").replace("\r", "\n").split("\n"):  # U+2028 and U+0085 are text
        if line.startswith("data:") and not line.endswith("[DONE]"):
            event = parse_json(line.removeprefix("data:"))
            if event.get("error") or event.get("type") == "error":  # the server gave up, with status 200
                raise ValueError("the reply broke off")
            yield event


def _chat_replies(reply: Row) -> list[Row]:
    return [
        {"message": choice["message"], "finish_reason": choice["finish_reason"], "usage": reply.get("usage")}
        for choice in reply["choices"]
    ]


def _whole_chat(events: Iterable[Row]) -> Row:
    choices: dict[int, Row] = {}
    calls: dict[tuple[int, int | None], Row] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for piece in event.get("choices") or ():
            index, delta = piece.get("index") or 0, piece.get("delta") or {}
            message = {"role": "assistant", "content": ""}
            choice = choices.setdefault(index, {"message": message, "finish_reason": None})
            choice["finish_reason"] = piece.get("finish_reason") or choice["finish_reason"]
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    choice["message"][key] = choice["message"].get(key, "") + delta[key]
            for part in delta.get("tool_calls") or ():
                number, function = part.get("index"), part.get("function") or {}
                call = calls.get((index, number))
                # Some servers number no call, or all calls alike.
                is_other = call is None or number is None or part.get("id") not in (None, call.get("id"))
                if call is None or (function.get("name") and is_other):
                    call = calls[index, number] = _call(None, "", "")
                    choice["message"].setdefault("tool_calls", []).append(call)
                call |= {"id": part["id"]} if part.get("id") else {}
                for key, text in function.items():
                    call["function"][key] += text or ""
    if any(choice["finish_reason"] is None for choice in choices.values()):
        raise ValueError("the reply broke off")
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _of_responses(request: Row) -> Row:
    """Return a request for a response; items of a hosted tool are of no chat, and raise KeyError."""
    items = request["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    messages = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    return _request(request, messages + _messages(items), "parameters")


def _messages(items: Iterable[Row]) -> list[Row]:
    messages: list[Row] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        else:  # the items of a reply are one message
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if kind == "message":
                messages[-1]["content"] += _text(item["content"])
            elif kind == "reasoning":
                messages[-1]["reasoning_content"] = _text(item.get("content") or item.get("summary") or ())
            else:
                call = _call(item["call_id"], item["name"], item["arguments"])
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _response_replies(reply: Row) -> list[Row]:
    (message,) = _messages(reply["output"])
    reason = "length" if reply.get("status") == "incomplete" else "tool_calls" if "tool_calls" in message else "stop"
    return [{"message": message, "finish_reason": reason, "usage": _usage(reply), "id": reply["id"]}]


def _whole_response(events: Iterable[Row]) -> Row:
    ended = ("response.completed", "response.incomplete")
    (response,) = [event["response"] for event in events if event["type"] in ended]
    return dict(response)


def _of_anthropic(request: Row) -> Row:
    messages = [{"role": "system", "content": _text(request["system"])}] if request.get("system") else []
    for message in request["messages"]:
        messages += _turn(message["role"], message["content"])
    return _request(request, messages, "input_schema")


def _turn(role: str, content: Any) -> Iterator[Row]:
    """Yield the messages of a turn: results of tools are messages of a chat, before the words."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content") or "")}
    message: Row = {"role": role, "content": _text(block for block in blocks if block["type"] == "text")}
    if thought := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thought
    if used := [block for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = [_call(block["id"], block["name"], block["input"]) for block in used]
    if message["content"] or role == "assistant":
        yield message


def _anthropic_replies(reply: Row) -> list[Row]:
    (message,) = _turn("assistant", reply["content"])
    reason = _REASONS.get(reply["stop_reason"], reply["stop_reason"])
    return [{"message": message, "finish_reason": reason, "usage": _usage(reply)}]


def _whole_anthropic(events: Iterable[Row]) -> Row:
    reply: Row = {}
    blocks: dict[int, Row] = {}
    for event in events:
        if event["type"] == "message_start":
            reply = event["message"]
        elif event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "partial_json": ""}
        elif event["type"] == "content_block_delta":
            for key, text in event["delta"].items():
                if key in ("text", "thinking", "partial_json"):
                    blocks[event["index"]][key] += text
        elif event["type"] == "message_delta":
            reply |= event["delta"]
            reply["usage"] = {**reply["usage"], **(event.get("usage") or {})}
    if reply["stop_reason"] is None:
        raise ValueError("the reply broke off")
    for block in blocks.values():
        if block["partial_json"]:
            block["input"] = parse_json(block["partial_json"])
    return {**reply, "content": [blocks[index] for index in sorted(blocks)]}


def _request(request: Row, messages: list[Row], schema: str) -> Row:
    tools = []
    for tool in request.get("tools") or ():
        if schema in tool:  # hosted tools have none: their calls are no messages of a chat
            function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool[schema]}
            tools.append({"type": "function", "function": function})
    return {"model": request.get("model"), "messages": messages, **({"tools": tools} if tools else {})}


def _call(call_id: str | None, name: str, arguments: Any) -> Row:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    known = {} if call_id is None else {"id": call_id}
    return {**known, "type": "function", "function": {"name": name, "arguments": written}}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _usage(reply: Row) -> Row | None:
    usage = reply.get("usage")
    return usage and {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}


# By the end of the path.
APIS = {
    "/chat/completions": Api(lambda request: request, _chat_replies, _whole_chat),
    "/responses": Api(_of_responses, _response_replies, _whole_response),
    "/messages": Api(_of_anthropic, _anthropic_replies, _whole_anthropic),
}
