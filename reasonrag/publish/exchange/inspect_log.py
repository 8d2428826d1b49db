"""A log of inspect_ai to a recording: what an agent's model was asked and said, as `reasonrag record` keeps it.

A log is one JSON object: `samples`, each with `input`, `target` and `events`; an event of the kind `model` holds one
call. Messages that calls share lie in `events_data.messages` and long texts in `attachments`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reasonrag.core.documents import map_texts, parse_json
from reasonrag.core.errors import DataError
from reasonrag.core.secrets import excerpt, redact_data
from reasonrag.publish.exchange.exporters import output, write_json_lines
from reasonrag.storage.records import CALLS

QUESTIONS = "questions.jsonl"

_ATTACHED = "attachment://"

Row = dict[str, Any]


def import_inspect(source: Path, out: Path) -> dict[str, int]:
    """Write the calls of a log as `calls.jsonl`, and its samples with their targets as `questions.jsonl`.

    A sample is a conversation, in each epoch another one. Calls that failed, and thoughts, are left out.

    Returns:
        The numbers of `conversations`, `calls` and `questions`.

    Raises:
        DataError: the file is no log in JSON, or nothing in it is a call.
        RunError: see `exporters.output`.
    """
    calls: list[Row] = []
    questions: dict[str, Row] = {}
    try:
        for sample in parse_json(redact_data(source.read_text(encoding="utf-8"), "a log"))["samples"]:
            asked, target = sample["input"], sample["target"]
            if isinstance(asked, list):
                asked = [_message(message)["content"] for message in asked if message["role"] == "user"][-1]
            golden = [target] if isinstance(target, str) else target
            questions[str(sample["id"])] = {"id": str(sample["id"]), "question": asked, "golden_answers": golden}
            calls += _calls(sample)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{source} is no log of inspect_ai in JSON ({type(error).__name__}: {excerpt(str(error), 80)}); "
            "`inspect log dump FILE.eval > FILE.json` writes one"
        ) from error
    if not calls:
        raise DataError(f"{source} has no call of a model among its {len(questions)} samples")
    with output(out, "import.json", CALLS, QUESTIONS) as counts:
        counts["conversations"] = len({call["conversation"] for call in calls})
        counts["calls"] = write_json_lines(out / CALLS, calls)
        counts["questions"] = write_json_lines(out / QUESTIONS, questions.values())
    return counts


def _calls(sample: Row) -> Iterator[Row]:
    """Yield the calls of a sample as lines of a recording."""
    pool = (sample.get("events_data") or {}).get("messages") or ()
    made = [event for event in sample["events"] if event["event"] == "model" and event["output"].get("choices")]
    for number, event in enumerate(event for event in made if not event.get("error")):
        shared = [message for start, end in event.get("input_refs") or () for message in pool[start:end]]
        asked, said, tools = _attached(
            (event["input"] or shared, event["output"]["choices"][0], event["tools"]), sample["attachments"]
        )
        functions = [{key: tool[key] for key in ("name", "description", "parameters")} for tool in tools]
        yield {
            "conversation": f"{sample['id']}, epoch {sample['epoch']}",
            "call": number,
            "request": {
                "model": event["model"],
                "messages": [_message(message) for message in asked],
                "tools": [{"type": "function", "function": function} for function in functions],
            },
            "message": _message(said["message"]),
            "finish_reason": said["stop_reason"],
        }


def _attached(value: Any, attachments: Row) -> Any:
    """Return a value with the texts that it refers to."""
    return map_texts(
        value, lambda text: attachments.get(text.removeprefix(_ATTACHED), text) if text.startswith(_ATTACHED) else text
    )


def _message(message: Row) -> Row:
    """Return a message as OpenAI's servers take it."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    functions = [(call["id"], call["function"], call["arguments"]) for call in message.get("tool_calls") or ()]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}}
        for id, name, given in functions
    ]
    answered = {"tool_call_id": message["tool_call_id"]} if message["role"] == "tool" else {}
    return {"role": message["role"], "content": content} | answered | ({"tool_calls": calls} if calls else {})
