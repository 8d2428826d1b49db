"""The recording proxy over real HTTP: the agent gets what the model said, and calls are kept by conversation."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from reasonrag.agents.recorder import Recorder, RecordSettings, record
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.serving import App, ListenSettings, Receive, Response, Scope
from reasonrag.storage.records import CALLS, read_calls
from tests.serving import serving

KEY = "sk-proj-abcdefghijklmnop1234567890ABCDEFGHIJ"


class Upstream(App):
    """A model that calls a search first, and answers once it has a result; streams if it is asked to."""

    def __init__(self) -> None:
        super().__init__(ListenSettings(), token=None)
        self.routes = {"/v1/chat/completions": ("POST", self.chat), "/v1/models": ("GET", self.models)}
        self.seen: list[dict[bytes, bytes]] = []

    async def models(self, scope: Scope, receive: Receive) -> Response:
        return Response(b'{"data": []}')

    async def chat(self, scope: Scope, receive: Receive) -> Response:
        self.seen.append(dict(scope["headers"]))
        request = json.loads(await self.body(scope, receive))
        if "broken" in request:
            return Response(b'{"error": {"message": "slow down"}}', 429, headers={"Retry-After": "7"})
        searched = any(message["role"] == "tool" for message in request["messages"])
        function = {"name": "search", "arguments": '{"query": "Jaws"}'}
        call = {"id": "call1", "type": "function", "function": function}
        message = {"content": "Steven Spielberg"} if searched else {"content": None, "tool_calls": [call]}
        reason = "stop" if searched else "tool_calls"
        if request.get("stream"):
            return Response(self.streamed(message, reason), media_type="text/event-stream")
        choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
        return Response(json.dumps({"choices": [choice]}).encode())

    async def streamed(self, message: dict[str, Any], reason: str) -> AsyncIterator[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in (message.get("content") or "").partition(" ") if piece]
        for call in message.get("tool_calls", ()):
            pieces = call["function"]["arguments"].partition(":")
            deltas.append({"tool_calls": [{"index": 0, **call, "function": {"name": "search", "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
        for delta in deltas:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()
            await asyncio.sleep(0)
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': reason}]})}\n\n".encode()
        yield b"data: [DONE]\n\n"


@contextmanager
def recording(out: Path) -> Iterator[tuple[int, Upstream]]:
    """Yield the port of the proxy, and the model behind it."""
    upstream = Upstream()
    out.mkdir(exist_ok=True)
    with serving(upstream) as port:
        recorder = Recorder(f"http://127.0.0.1:{port}/v1", out, RecordSettings())
        with serving(recorder) as own:
            yield own, upstream


def post(port: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, bytes, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read(), response.headers


def ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": question}]


def conversation(port: int, question: str, *, stream: bool, path: str = "/v1/chat/completions") -> None:
    """Play an agent with one search."""
    messages = ask(question)
    post(port, {"model": "m", "messages": messages, "stream": stream}, path)
    function = {"name": "search", "arguments": '{"query": "Jaws"}'}
    call = {"id": "call1", "type": "function", "function": function}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "call1", "content": "Jaws is a film by Steven Spielberg."}]
    post(port, {"model": "m", "messages": messages, "stream": stream}, path)


def test_calls_are_kept_by_conversation_whether_they_stream_or_not(tmp_path: Path) -> None:
    with recording(tmp_path) as (port, _):
        conversation(port, "Who directed Jaws?", stream=False)
        conversation(port, "Who made Jaws?", stream=True)
        conversation(port, "Who filmed Jaws?", stream=True, path="/c/mine/v1/chat/completions")
    calls = list(read_calls(tmp_path))
    named = [(call["conversation"], call["call"]) for call in calls]
    assert named == [(name, call) for name in ("conversation-1", "conversation-2", "mine") for call in (0, 1)]
    said = [[call["message"].get(key) for key in ("role", "content", "tool_calls")] for call in calls]
    assert said[0][2][0]["function"]["arguments"] == said[2][2][0]["function"]["arguments"] == '{"query": "Jaws"}'
    assert said[2][2][0]["id"] == "call1"
    assert said[1] == said[3] == said[5] == ["assistant", "Steven Spielberg", None]
    with recording(tmp_path) as (port, _):  # begun again: the same conversation goes on
        messages = [*calls[1]["request"]["messages"], calls[1]["message"], {"role": "user", "content": "Sure?"}]
        post(port, {"model": "m", "messages": messages})
    assert (list(read_calls(tmp_path))[-1]["conversation"]) == "conversation-1"


def test_the_agent_gets_what_the_model_said_and_the_key_goes_to_the_model_alone(tmp_path: Path) -> None:
    with recording(tmp_path) as (port, upstream):
        status, body, _ = post(port, {"messages": [{"role": "user", "content": f"my key is {KEY}"}], "stream": True})
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        assert upstream.seen[0][b"authorization"] == f"Bearer {KEY}".encode()
        status, body, headers = post(port, {"messages": ask("a"), "broken": True})
        assert (status, headers["Retry-After"]) == (429, "7") and b"slow down" in body
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("GET", "/v1/models")
            assert connection.getresponse().read() == b'{"data": []}'
    (kept,) = (tmp_path / CALLS).read_text().splitlines()
    assert KEY not in kept and "my key is ***" in kept


def test_folders_and_addresses_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds other files"):
        record("http://127.0.0.1:9/v1", tmp_path, RecordSettings())
    with pytest.raises(ConfigError, match="not an http"):
        record("127.0.0.1:9", tmp_path, RecordSettings())
