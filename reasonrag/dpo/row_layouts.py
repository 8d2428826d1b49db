"""One raw row of preference data to a checked one, whatever its layout; rows that cannot be used are named."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.dpo.token_rows import ChatSides, Messages, Row, StepSides, StepText, TextSides
from reasonrag.storage.records import RowProblems, text_id

LAYOUTS = (("prompt", "chosen", "rejected"), ("chosen_steps", "rejected_steps"))
FURTHER = [
    *("chosen_end", "rejected_end", "margin", "depth", "dataset", "question_id", "tools", "chat_template_kwargs"),
    *("instruction", "input"),  # of the published RAG-ProGuide
]
OWN = {"question_id", "dataset", "depth", "margin"}
NEEDED = (
    "Needed are prompt, chosen and rejected (lists of messages, or texts), or chosen_steps and rejected_steps; "
    "repair or remove these rows."
)
BY_PROMPT = "prompt "  # begins the group of a row that names no question
_ENDS = ("stop", "turn", "length")

Raw = tuple[int, Mapping[str, Any]]


class Unusable(Exception):
    """A row cannot be used; the message says why, without the row's number, so that equal problems can be counted."""


def checked_rows(name: str, raw: Iterable[Raw], problems: RowProblems) -> list[Row]:
    """The rows that can be used.

    Raises:
        DataError: some cannot; it names them and says why.
    """
    rows = []
    for number, row in raw:
        try:
            rows.append(read_row(f"{name} row {number}", row))
        except Unusable as problem:
            problems.add(str(problem), number)
    problems.check(NEEDED)
    return rows


def read_row(place: str, raw: Mapping[str, Any]) -> Row:
    """Check one row of any layout.

    Args:
        place: file and number of the row, for later messages.
        raw: the row's columns; further ones are ignored.

    Raises:
        Unusable: the row holds no preference that can be trained on.
    """
    sides = _sides(raw)
    margin, depth, dataset = raw.get("margin"), raw.get("depth"), raw.get("dataset")
    if margin is not None and not (isinstance(margin, int | float) and math.isfinite(margin)):
        raise Unusable("margin is no finite number")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise Unusable("depth is no count of steps")
    if raw.get("question_id") is None:
        prompt = sides.chosen[0].prompt if isinstance(sides, StepSides) else sides.prompt
        question = BY_PROMPT + hashlib.sha256(json.dumps(prompt, default=as_fields).encode()).hexdigest()[:16]
    else:
        question = text_id(raw["question_id"]) or ""
        if not question:
            raise Unusable("question_id is empty, or neither a text nor a whole number")
    group = (valid_unicode(dataset) if isinstance(dataset, str) else "", question)
    return Row(place, sides, None if margin is None else float(margin), depth or 0, group)


def _sides(raw: Mapping[str, Any]) -> StepSides | ChatSides | TextSides:
    trajectory = any(raw.get(name) is not None for name in LAYOUTS[1])
    for name in LAYOUTS[trajectory]:
        if raw.get(name) is None:
            raise Unusable(f"{name} missing")
    if trajectory:
        return StepSides(_steps(raw, "chosen_steps"), _steps(raw, "rejected_steps"))
    values = {name: raw[name] for name in LAYOUTS[0]}
    ends = {name: raw.get(f"{name}_end") for name in ("chosen", "rejected")}
    if all(isinstance(value, str) for value in values.values()):
        if any(ends.values()):
            raise Unusable("chosen_end and rejected_end go with lists of messages, not with texts")
        for name, value in values.items():
            if not value.strip():
                raise Unusable(f"{name} is empty")
        return _proguide(raw, values) or TextSides(**values)
    if not all(isinstance(value, list) for value in values.values()):
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    chats = {name: messages(name, value) for name, value in values.items()}
    if any(value is not None for value in ends.values()):
        prompt = _open_turn(chats["prompt"])
        return StepSides(*((_step(prompt, name, chats[name], end),) for name, end in ends.items()))
    for name in ("chosen", "rejected"):
        if not any(message["content"].strip() for message in chats[name]):
            raise Unusable(f"{name} is empty")
    return ChatSides(**chats, template=_template(raw))


def _proguide(raw: Mapping[str, Any], values: Mapping[str, str]) -> ChatSides | None:
    """A row of the published RAG-ProGuide: `prompt` writes down in one text what system and user say."""
    system, user = raw.get("instruction"), raw.get("input")
    if not (
        isinstance(system, str) and isinstance(user, str) and values["prompt"] == f"System: {system}\nUser: {user}"
    ):
        return None
    asked = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    sides = {name: [{"role": "assistant", "content": values[name]}] for name in ("chosen", "rejected")}
    return ChatSides(asked, **sides, template={"tools": None})


def messages(name: str, value: list[Any]) -> Messages:
    """Return `value` if it is a list of messages; `name` is its column, for the error.

    Raises:
        Unusable: it is empty, or an item has no role and content of text.
    """
    if not value:
        raise Unusable(f"{name} is empty")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise Unusable(f"{name} holds something else than messages with a role and a content of text")
    return value


def _prompt(messages: Messages, prefix: str = "") -> Prompt:
    chat = tuple(Message(message["role"], message["content"]) for message in messages)
    return Prompt(chat, (Span(prefix),) if prefix else ())


def _open_turn(messages: Messages) -> Prompt:
    """A prompt that ends with the assistant goes on with that turn, as TRL has it."""
    *before, last = messages
    if last["role"] != "assistant":
        return _prompt(messages)
    if not before:
        raise Unusable("prompt is an open turn and nothing else")
    return _prompt(before, last["content"])


def _step(prompt: Prompt, name: str, messages: Messages, end: object) -> StepText:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise Unusable(f"{name} is not one message of the assistant, as its end says")
    return StepText(prompt, messages[0]["content"], _end(f"{name}_end", end))


def _steps(raw: Mapping[str, Any], name: str) -> tuple[StepText, ...]:
    value = raw[name]
    if not isinstance(value, list) or not value:
        raise Unusable(f"{name} is empty, or no list of steps")
    steps = []
    for step in value:
        if not isinstance(step, dict) or not isinstance(step.get("text"), str):
            raise Unusable(f"{name} holds something else than steps with a prompt, a text and an end")
        prompt, prefix = step.get("prompt"), step.get("prefix") or ""
        if not isinstance(prompt, list) or not isinstance(prefix, str):
            raise Unusable(f"{name} has a step whose prompt is no list of messages")
        asked = _prompt(messages(f"a prompt of {name}", prompt), prefix)
        steps.append(StepText(asked, step["text"], _end(f"an end of {name}", step.get("end"))))
    return tuple(steps)


def _end(name: str, value: object) -> str:
    if value not in _ENDS:
        raise Unusable(f"{name} is none of {', '.join(_ENDS)}")
    return str(value)


def _template(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL passes to the chat template: the columns `tools` (a list, or JSON) and `chat_template_kwargs`."""
    tools, further = raw.get("tools"), raw.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise Unusable("tools is not JSON") from None
    if not isinstance(further, dict):
        raise Unusable("chat_template_kwargs is no mapping")
    return {"tools": tools, **further}


def as_fields(value: Any) -> Any:
    """A value that JSON does not know: a slotted dataclass, or what a foreign table may hold for a template."""
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else str(value)
