"""The recording proxy over real HTTP: the agent gets the model's replies, and calls are kept by conversation."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from contrib.record import Recorder
from reasonrag.core.errors import ConfigError
from reasonrag.storage.parquet import CALLS, read_calls

KEY = "sk-proj-abcdefghijklmnop1234567890ABCDEFGHIJ"
FUNCTION = {"name": "search", "arguments": '{"query": "Jaws"}'}
CALL = {"id": "call1", "type": "function", "function": FUNCTION}
CHAT = "/v1/chat/completions"


class Upstream:
    """A model that calls a search first, and answers once it has a result; streams if it is asked to."""

    def __init__(self):
        self.headers = []

    async def chat(self, request):
        self.headers.append(request.headers)
        body = await request.json()
        if "broken" in body:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "7"})
        searched = any(message["role"] == "tool" for message in body["messages"])
        message = {"content": "Steven Spielberg"} if searched else {"content": None, "tool_calls": [CALL]}
        reason = "stop" if searched else "tool_calls"
        if not body.get("stream"):
            choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
            return web.json_response({"choices": [choice]})
        deltas = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in (message.get("content") or "").partition(" ") if piece]
        for call in message.get("tool_calls", ()):
            pieces = call["function"]["arguments"].partition(":")
            deltas.append({"tool_calls": [{"index": 0, **call, "function": {"name": "search", "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
        chunks = [{"index": 0, "delta": delta} for delta in deltas] + [
            {"index": 0, "delta": {}, "finish_reason": reason}
        ]
        lines = [f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")


@asynccontextmanager
async def recording(out):
    """Yield a client of the proxy, and the model behind it."""
    upstream, app = Upstream(), web.Application()
    app.router.add_post(CHAT, upstream.chat)
    async with (
        TestServer(app) as server,
        TestClient(TestServer(Recorder(str(server.make_url("/v1")), out).app())) as client,
    ):
        client.session.headers["Authorization"] = f"Bearer {KEY}"
        yield client, upstream


async def converse(client, question, *, stream, path=CHAT):
    """Play an agent with one search."""
    messages = [{"role": "system", "content": "Search, then answer."}, {"role": "user", "content": question}]
    for more in (
        [],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "Jaws."}],
    ):
        messages += more
        await (await client.post(path, json={"model": "m", "messages": messages, "stream": stream})).read()


def test_calls_are_kept_by_conversation_whether_they_stream_or_not(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, _):
            await converse(client, "Who directed Jaws?", stream=False)
            await converse(client, "Who made Jaws?", stream=True)
            await converse(client, "Who filmed Jaws?", stream=True, path=f"/c/mine{CHAT}")
        calls = list(read_calls(tmp_path))
        async with recording(tmp_path) as (client, _):  # started again: the same conversation goes on
            messages = [*calls[1]["request"]["messages"], calls[1]["message"], {"role": "user", "content": "Sure?"}]
            await client.post(CHAT, json={"model": "m", "messages": messages})
        return calls

    calls = asyncio.run(play())
    names = [(call["conversation"], call["call"]) for call in calls]
    assert names == [(name, call) for name in ("conversation-1", "conversation-2", "mine") for call in (0, 1)]
    replies = [[call["message"].get(key) for key in ("role", "content", "tool_calls")] for call in calls]
    assert replies[0][2][0]["function"] == replies[2][2][0]["function"] == FUNCTION
    assert replies[2][2][0]["id"] == "call1"
    assert replies[1] == replies[3] == replies[5] == ["assistant", "Steven Spielberg", None]
    assert (list(read_calls(tmp_path))[-1]["conversation"]) == "conversation-1"


def test_the_agent_gets_the_reply_and_the_key_goes_to_the_model_alone(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, upstream):
            body = {"messages": [{"role": "user", "content": f"my key is {KEY}"}], "stream": True}
            reply = await client.post(CHAT, json=body)
            assert reply.status == 200 and (await reply.text()).endswith("data: [DONE]\n\n")
            assert upstream.headers[0]["Authorization"] == f"Bearer {KEY}"
            reply = await client.post(CHAT, json={"messages": [], "broken": True})
            assert (reply.status, reply.headers["Retry-After"]) == (429, "7") and "slow down" in await reply.text()
            assert (await client.get("/v1@evil.example/")).status == 404

    asyncio.run(play())
    (kept,) = (tmp_path / CALLS).read_text().splitlines()
    assert KEY not in kept and "my key is ***" in kept


@pytest.mark.fault(
    "A16",
    "dot segments in the path of a call that is recorded, as they are or as %2e; a query in --upstream",
    "refused; nothing reaches the upstream's server",
    before="arrived above the upstream's path, with the client's key",
)
def test_no_path_leads_above_that_of_the_upstream(tmp_path, figure):
    paths = ("/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1/x%5c..%5cadmin", "/c/NAME/v1/%2e/admin")

    async def play():
        async with recording(tmp_path) as (client, _):
            return [await (await client.get(URL(path, encoded=True))).text() for path in paths]

    replies = asyncio.run(play())
    figure(f"{replies.count('ask below /v1/ or /c/NAME/v1/')} of {len(paths)} refused")
    assert {*replies} == {"ask below /v1/ or /c/NAME/v1/"}
    for address, problem in (("127.0.0.1:9", "not an http"), ("http://127.0.0.1:9/v1?key=abc", "no query")):
        with pytest.raises(ConfigError, match=problem):
            Recorder(address, tmp_path)


@pytest.mark.fault(
    "A16",
    "the last line of a recording has no line end, or was cut off by a kill",
    "a whole call is kept, a part of one is cut off",
    before="the last whole call was deleted without a word",
)
def test_a_whole_last_call_without_a_line_end_is_kept(tmp_path, figure):
    async def play():
        async with recording(tmp_path) as (client, _):
            await converse(client, "Who directed Jaws?", stream=False)

    asyncio.run(play())
    file, kept = tmp_path / CALLS, []
    whole = file.read_bytes()
    for cut in (1, 2, 0):
        file.write_bytes(whole[: len(whole) - cut])
        before = len(list(read_calls(tmp_path)))
        Recorder("http://127.0.0.1:9/v1", tmp_path)
        kept.append((before, file.read_bytes().count(b"\n")))
    figure(f"without a line end {kept[0][1]} of 2 calls, cut {kept[1][1]}")
    assert kept == [(2, 2), (1, 1), (2, 2)]
