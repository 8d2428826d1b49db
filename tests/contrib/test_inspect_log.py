"""Logs of inspect_ai: their calls become a recording, whose conversations can be branched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contrib.inspect_log import convert
from reasonrag.core.errors import DataError
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.storage.parquet import read_calls
from reasonrag.storage.questions import load_questions

LONG = "Jaws is a film by Steven Spielberg. " * 4
THOUGHT = {"type": "reasoning", "reasoning": "I have to look."}
CALL = {"id": "c1", "function": "search", "arguments": {"query": "Jaws"}, "type": "function"}
CALLED = {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": ""}], "tool_calls": [CALL]}
MESSAGES = [
    {"role": "system", "content": "Search."},
    {"role": "user", "content": "Who directed Jaws?"},
    CALLED,
    {"role": "tool", "content": "attachment://abc", "tool_call_id": "c1", "function": "search"},
]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def event(start: int, end: int, said: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a call whose messages are in the pool, as newer versions write them."""
    tools = [{"name": "search", "description": "Look it up.", "parameters": PARAMETERS}]
    output = {"choices": [{"message": said, "stop_reason": "stop"}]}
    refs = {"input": [], "input_refs": [[start, end]]}
    return {"event": "model", "model": "m", "tools": tools, "output": output, **refs, **more}


def sample(epoch: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "Steven Spielberg"}
    failed = event(0, 2, answer, error="overloaded")
    events = [{"event": "state"}, failed, event(0, 2, CALLED), event(0, 4, answer)]
    return {
        **{"id": 7, "epoch": epoch, "input": "Who directed Jaws?", "target": ["Spielberg", "Steven Spielberg"]},
        **{"events": events, "events_data": {"messages": MESSAGES}, "attachments": {"abc": LONG}},
    }


def test_the_calls_of_a_log_are_a_recording_that_can_be_branched(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps({"version": 2, "samples": [sample(1), sample(2)]}))
    counts = convert(tmp_path / "log.json", tmp_path / "agent")
    assert counts == {"conversations": 2, "calls": 4, "questions": 1}
    questions = load_questions(str(tmp_path / "agent" / "questions.jsonl"))
    assert [(q.id, q.golden_answers) for q in questions] == [("7", ("Spielberg", "Steven Spielberg"))]
    form = RecordedFormat(read_calls(tmp_path / "agent"), questions, parser="hermes")
    ((first, second),) = form.trajectories.values()
    assert first == second and first.answer == "Steven Spielberg"
    assert first.steps[0].passages[0].contents == LONG and form.function == "search"


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for written, problem in (
        (b"PK\3\4\xff", r"not a log of inspect_ai in JSON .*inspect log dump"),
        (b'{"version": 2, "status": "started"}', r"not a log of inspect_ai in JSON \(KeyError: 'samples'\)"),
        (json.dumps({"samples": [{**sample(1), "events": []}]}).encode(), "no model call in its 1 samples"),
    ):
        log.write_bytes(written)
        with pytest.raises(DataError, match=problem):
            convert(log, tmp_path / "out")
    assert not (tmp_path / "out").exists()
