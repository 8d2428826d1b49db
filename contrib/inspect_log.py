"""Convert a log of inspect_ai to a recording, as `contrib.record` writes it.

    inspect log dump logs/agent.eval > agent.json
    python -m contrib.inspect_log agent.json recordings/inspect
    reasonrag build-tree --recording recordings/inspect --dataset recordings/inspect/questions.jsonl ...

A log is one JSON object: `samples`, each with `input`, `target` and `events`; an event of the kind `model` holds one
call. Calls share messages through `events_data.messages` and long texts through `attachments`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import excerpt, map_texts, parse_json, redact_data, valid_unicode

_ATTACHED = "attachment://"

Row = dict[str, Any]


def convert(source: Path, out: Path) -> dict[str, int]:
    """Write the calls of a log as `calls.jsonl`, and its samples with their targets as `questions.jsonl`.

    Each epoch of a sample is a conversation. Failed calls and thoughts are left out, and secrets are replaced.

    Returns:
        The numbers of `conversations`, `calls` and `questions`.
    """
    calls: list[Row] = []
    questions: dict[str, Row] = {}
    try:
        log = parse_json(redact_data(source.read_text(encoding="utf-8"), "a log"))
        for sample in log["samples"]:
            text, target = sample["input"], sample["target"]
            if isinstance(text, list):
                text = [_message(message)["content"] for message in text if message["role"] == "user"][-1]
            golden = [target] if isinstance(target, str) else target
            questions[str(sample["id"])] = {"id": str(sample["id"]), "question": text, "golden_answers": golden}
            calls += _calls(sample)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{source} is not a log of inspect_ai in JSON ({type(error).__name__}: {excerpt(str(error), 80)}); "
            "`inspect log dump FILE.eval > FILE.json` writes one"
        ) from error
    if not calls:
        raise DataError(f"{source} has no model call in its {len(questions)} samples")
    out.mkdir(parents=True, exist_ok=True)
    _write_lines(out / "calls.jsonl", calls)
    _write_lines(out / "questions.jsonl", list(questions.values()))
    conversations = {call["conversation"] for call in calls}
    return {"conversations": len(conversations), "calls": len(calls), "questions": len(questions)}


def _calls(sample: Row) -> Iterator[Row]:
    """Yield the calls of a sample as lines of a recording."""
    pool = (sample.get("events_data") or {}).get("messages") or ()
    number = 0
    for event in sample["events"]:
        if event["event"] != "model" or event.get("error") or not event["output"].get("choices"):
            continue
        messages = list(event["input"])
        if not messages:
            for start, end in event.get("input_refs") or ():
                messages += pool[start:end]
        parts = (messages, event["output"]["choices"][0], event["tools"])
        messages, choice, tools = _with_attachments(parts, sample["attachments"])
        functions = [{key: tool[key] for key in ("name", "description", "parameters")} for tool in tools]
        request = {
            "model": event["model"],
            "messages": list(map(_message, messages)),
            "tools": [{"type": "function", "function": function} for function in functions],
        }
        yield {
            "conversation": f"{sample['id']}, epoch {sample['epoch']}",
            "call": number,
            "request": request,
            "message": _message(choice["message"]),
            "finish_reason": choice["stop_reason"],
        }
        number += 1


def _with_attachments(value: Any, attachments: Row) -> Any:
    """Return a value with its references to long texts replaced by those texts."""

    def resolve(text: str) -> str:
        return str(attachments.get(text.removeprefix(_ATTACHED), text)) if text.startswith(_ATTACHED) else text

    return map_texts(value, resolve)


def _message(message: Row) -> Row:
    """Return a message in the OpenAI format."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    converted: Row = {"role": message["role"], "content": content}
    if message["role"] == "tool":
        converted["tool_call_id"] = message["tool_call_id"]
    calls = []
    for call in message.get("tool_calls") or ():
        function = {"name": call["function"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return converted | ({"tool_calls": calls} if calls else {})


def _write_lines(path: Path, rows: list[Row]) -> None:
    lines = [valid_unicode(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])))
