"""The recording proxy over real HTTP: the agent gets the model's replies, and calls are kept by conversation."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from contrib.apis import APIS, parse_replies
from contrib.record import Conversations, Recorder, main
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.llm.openai_wire import messages_of
from reasonrag.storage.files import lock
from reasonrag.storage.inputs import CALLS, read_calls

KEY = "sk-proj-abcdefghijklmnop1234567890ABCDEFGHIJ"
FUNCTION = {"name": "search", "arguments": '{"query": "Jaws"}'}
CALL = {"id": "call1", "type": "function", "function": FUNCTION}
CHAT = "/v1/chat/completions"


class Upstream:
    """A model that calls a search first, and answers once it has a result; streams if it is asked to."""

    def __init__(self):
        self.headers, self.replies = [], []

    async def reply(self, request):
        """Answer with the next of `replies`: JSON, or the events of a stream."""
        reply = self.replies.pop(0)
        if isinstance(reply, dict):
            return web.json_response(reply)
        lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in reply]
        return web.Response(text="".join(lines), content_type="text/event-stream")

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
    app.router.add_post("/v1/{other:.*}", upstream.reply)
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
            said = f"my key is {KEY}, password:\t{KEY[8:]}"
            body = {"messages": [{"role": "user", "content": said}], "stream": True}
            reply = await client.post(CHAT, json=body)
            assert reply.status == 200 and (await reply.text()).endswith("data: [DONE]\n\n")
            assert upstream.headers[0]["Authorization"] == f"Bearer {KEY}"
            reply = await client.post(CHAT, json={"messages": [], "broken": True})
            assert (reply.status, reply.headers["Retry-After"]) == (429, "7") and "slow down" in await reply.text()
            assert (await client.get("/v1@evil.example/")).status == 404

    asyncio.run(play())
    (kept,) = (tmp_path / CALLS).read_text().splitlines()
    assert KEY[8:] not in kept and "my key is ***" in kept


def test_a_packed_request_is_passed_on_unpacked(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, upstream):
            body = gzip.compress(json.dumps({"messages": [{"role": "user", "content": "Who?"}]}).encode())
            reply = await client.post(CHAT, data=body, headers={"Content-Encoding": "gzip"})
            assert reply.status == 200 and "Content-Encoding" not in upstream.headers[0]

    asyncio.run(play())
    assert [call["request"]["messages"][0]["content"] for call in read_calls(tmp_path)] == ["Who?"]


def test_a_call_is_kept_if_the_agent_has_gone_and_not_if_the_model_broke_off(tmp_path):
    begun, asked = asyncio.Event(), []

    async def slow(request):
        asked.append(await request.json())
        begun.set()
        await asyncio.sleep(0.2)
        if asked[-1]["messages"][-1]["content"] != "break off":
            message = {"role": "assistant", "content": "Spielberg"}
            return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        request.transport.abort()
        return response

    async def play():
        app = web.Application()
        app.router.add_post(CHAT, slow)
        async with TestServer(app) as server:
            # As `web.run_app` serves it: TestServer would cancel a call with its client.
            runner = web.AppRunner(Recorder(str(server.make_url("/v1")), tmp_path).app())
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with aiohttp.ClientSession("http://127.0.0.1:{1}".format(*runner.addresses[0])) as client:
                call = asyncio.create_task(client.post(CHAT, json={"messages": [{"role": "user", "content": "Who?"}]}))
                await begun.wait()
                call.cancel()
                while not (tmp_path / CALLS).exists():  # noqa: ASYNC110 -- the proxy is to write it, unasked
                    await asyncio.sleep(0.01)
                with pytest.raises((aiohttp.ClientError, OSError)):
                    body = {"messages": [{"role": "user", "content": "break off"}]}
                    await (await client.post(CHAT, json=body)).read()
                assert (await client.post(CHAT, json={}, headers={"Origin": "http://evil.example"})).status == 403
                assert (await client.get("/v1/models", headers={"Host": "evil.example:80"})).status == 400
            await runner.cleanup()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(asyncio.wait_for(play(), 30))
    assert [call["message"]["content"] for call in read_calls(tmp_path)] == ["Spielberg"]
    assert [log["log_level"] for log in logs] == ["warning"] and len(asked) == 2


def test_a_call_that_the_disk_has_no_room_for_is_lost_alone_and_one_that_is_too_big_too(tmp_path):
    """A limit of a file's size stands for a full disk."""

    async def play():
        async with recording(tmp_path) as (client, upstream):
            await converse(client, "Who directed Jaws?", stream=False)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / CALLS).stat().st_size + 100, before[1]))
            try:
                await converse(client, "Who made Jaws?", stream=False)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            upstream.replies = [{"content": [{"type": "text", "text": "x" * (65 << 20)}]}]
            assert len(await (await client.post("/v1/messages", json={"messages": []})).read()) > 65 << 20
            await converse(client, "Who filmed Jaws?", stream=False)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(play())
    asked = [call["request"]["messages"][1]["content"] for call in read_calls(tmp_path)]
    assert asked == ["Who directed Jaws?"] * 2 + ["Who filmed Jaws?"] * 2
    lost, big = "a call could not be written and is lost", "a reply of more than 64 MiB was passed on and is not kept"
    assert [log["event"] for log in logs] == [lost, lost, big]


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
    for address, problem in (("127.0.0.1:9", "not an http"), ("http://127.0.0.1:9/v1?key=abc", r"has a \? or #")):
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


def test_conversations_with_equal_beginnings_go_on_apart_and_no_name_is_taken_twice():
    conversations, user, searched = Conversations(), {"role": "user", "content": "Who?"}, KEPT[2]
    for _ in range(2):
        conversations.add([user], searched)
    results = [{"role": "tool", "content": text} for text in ("Jaws.", "A shark.")]
    told = [conversations.add([user, searched, result], KEPT[4]) for result in results]
    assert told == [("conversation-1", 1), ("conversation-2", 1)]
    after = Conversations()
    after.add([user], searched, "conversation-2")  # the rows of the first were deleted
    assert after.add([{"role": "user", "content": "Where?"}], searched) == ("conversation-3", 0)


def test_an_image_is_not_left_out_in_silence():
    content = [{"type": "text", "text": "Who is this?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(LookupError):
        messages_of({"messages": [{"role": "user", "content": content}]})


def test_two_recordings_in_one_file_are_refused(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, _):
            await converse(client, "Who directed Jaws?", stream=False)

    asyncio.run(play())
    (tmp_path / CALLS).write_text((tmp_path / CALLS).read_text() * 2)
    with pytest.raises(DataError, match="line 3: call 0 of conversation-1 stands there twice"):
        list(read_calls(tmp_path))


def test_a_second_recorder_of_a_folder_is_refused_and_leaves_the_line_that_the_first_is_writing(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / CALLS).write_text('{"conversation": "half')
    monkeypatch.setattr("sys.argv", ["record", "--upstream", "http://127.0.0.1:9/v1", "--out", str(tmp_path)])
    with lock(tmp_path / ".lock"), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is in use by another process" in capsys.readouterr().err
    assert (tmp_path / CALLS).read_text() == '{"conversation": "half'


@pytest.mark.parametrize("numbers", [(0, 0), (None, None)], ids=["numbered alike", "not numbered"])
def test_parallel_calls_of_a_stream_are_told_apart_by_their_ids(numbers):
    calls = [
        {"id": f"call{place}", "index": number, "function": {"name": "search", "arguments": piece}}
        for place, (number, piece) in enumerate(zip(numbers, ('{"query": "one', '{"query": "two"}'), strict=True))
    ]
    rest = {"index": numbers[0], "function": {"arguments": '"}'}}
    ends = [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}]
    events = [{"choices": [{"delta": {"tool_calls": [call]}}]} for call in (calls[0], rest, calls[1])] + ends
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    (reply,) = parse_replies(APIS["/chat/completions"], raw)
    told = [(call["id"], call["function"]["arguments"]) for call in reply["message"]["tool_calls"]]
    assert told == [("call0", '{"query": "one"}'), ("call1", '{"query": "two"}')]


def test_a_recorder_is_not_its_own_upstream(tmp_path, monkeypatch, capsys):
    words = ["record", "--upstream", "http://localhost:8020/v1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    assert "is this recorder itself" in capsys.readouterr().err


def test_a_recorder_that_is_ended_says_by_which_signal(tmp_path):
    command = [sys.executable, "-m", "contrib.record", "--upstream", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout.readline().startswith("recording")
        recorder.terminate()
        assert recorder.stdout.read() == "0 calls of 0 conversations are kept\n"
    assert recorder.returncode == 143


QUERY = json.loads(FUNCTION["arguments"])
FUNCTION_CALL = {"type": "function_call", "call_id": "call1", **FUNCTION}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Steven Spielberg"}]}
USED = {"type": "tool_use", "id": "call1", "name": "search", "input": QUERY}
TOOL = {"name": "search", "description": "Look up."}
KEPT = [
    {"role": "system", "content": "Search."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call1", "content": "Jaws."},
    {"role": "assistant", "content": "Steven Spielberg"},
]


def response(number, *output):
    return {"id": f"r{number}", "status": "completed", "output": output, "usage": {"input_tokens": 7}}


def message(reason, *content):
    return {"id": "m", "role": "assistant", "content": content, "stop_reason": reason, "usage": {"input_tokens": 7}}


def streamed(reply):
    """Return the events of a reply of one of the two APIs."""
    if "output" in reply:
        return [{"type": "response.created", "response": {}}, {"type": "response.completed", "response": reply}]
    (block,) = reply["content"]
    deltas = [{"type": "text_delta", "text": piece} for piece in block.get("text", "").partition(" ")]
    if "input" in block:
        pieces = json.dumps(block["input"]).partition(":")
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    start = block | ({"text": ""} if "text" in block else {"input": {}})
    return [
        {"type": "message_start", "message": reply | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": start},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "message_delta", "delta": {"stop_reason": reply["stop_reason"]}, "usage": {"output_tokens": 1}},
    ]


@pytest.mark.parametrize(
    ("api", "events"),
    [
        (
            "/chat/completions",
            [{"choices": [{"index": 0, "delta": {"content": "18"}}]}, {"error": {"message": "down"}}],
        ),
        ("/chat/completions", [{"choices": [{"index": 0, "delta": {"content": "18"}}]}]),
        ("/messages", [*streamed(message(None, {"type": "text", "text": "18"}))[:3], {"type": "error", "error": {}}]),
        ("/messages", streamed(message(None, {"type": "text", "text": "18"}))),
    ],
)
def test_a_stream_that_the_server_gave_up_is_no_reply(api, events):
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    with pytest.raises(ValueError, match="the reply broke off"):
        parse_replies(APIS[api], "".join([*lines, "data: [DONE]\n\n"]).encode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "messages", "previous_response_id"])
def test_responses_and_messages_are_kept_as_chat_completions(api, stream, tmp_path):
    user, replies = {"role": "user", "content": "Who?"}, [response(1, FUNCTION_CALL), response(2, SAID)]
    found = {"type": "function_call_output", "call_id": "call1", "output": "Jaws."}
    later = {"input": [user, FUNCTION_CALL, found]}
    if api == "previous_response_id":
        later = {"input": [found], "previous_response_id": "r1"}
    same = {"instructions": "Search.", "tools": [{**TOOL, "type": "function", "parameters": {"type": "object"}}]}
    bodies = [{**same, "input": "Who?"}, {**same, **later}]
    if api == "messages":
        replies = [message("tool_use", USED), message("end_turn", {"type": "text", "text": "Steven Spielberg"})]
        result = {"type": "tool_result", "tool_use_id": "call1", "content": [{"type": "text", "text": "Jaws."}]}
        same = {"system": "Search.", "tools": [{**TOOL, "input_schema": {"type": "object"}}]}
        turns = [{"role": "assistant", "content": [USED]}, {"role": "user", "content": [result]}]
        bodies = [{**same, "messages": [user]}, {**same, "messages": [user, *turns]}]

    async def play():
        async with recording(tmp_path) as (client, upstream):
            upstream.replies = [streamed(reply) if stream else reply for reply in replies]
            for body in bodies:
                path = "/v1/messages" if api == "messages" else "/v1/responses"
                assert (await client.post(path, json={**body, "stream": stream})).status == 200

    asyncio.run(play())
    first, second = read_calls(tmp_path)
    assert first["conversation"] == second["conversation"]
    assert [*first["request"]["messages"], first["message"]] == KEPT[:3] and first["finish_reason"] == "tool_calls"
    assert [*second["request"]["messages"], second["message"]] == KEPT and second["finish_reason"] == "stop"
    function = {**TOOL, "parameters": {"type": "object"}}
    assert first["request"]["tools"] == [{"type": "function", "function": function}]


def test_what_cannot_be_kept_is_refused_or_named_once(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, upstream):
            for body in ({"previous_response_id": "unknown"}, {"conversation": "mine"}):
                reply = await client.post("/v1/responses", json={"input": "Who?", **body})
                assert reply.status == 400 and "only the server has" in (await reply.json())["error"]["message"]
            upstream.replies = [{"choices": []}, {"choices": []}]
            for _ in range(2):
                assert (await client.post("/v1/completions", json={"prompt": "Who?"})).status == 200

    with structlog.testing.capture_logs() as logged:
        asyncio.run(play())
    assert ["refused" in line["event"] for line in logged] == [True, True, False]
    assert "/completions is passed on and not kept" in logged[-1]["event"] and not (tmp_path / CALLS).exists()


def test_every_choice_of_a_call_is_a_conversation_with_the_calls_before_it(tmp_path):
    def choices(*messages):
        said = [{"role": "assistant", **message} for message in messages]
        return {"choices": [{"message": message, "finish_reason": "stop"} for message in said]}

    async def play():
        async with recording(tmp_path) as (client, upstream):
            upstream.replies = [choices({"tool_calls": [CALL]}), choices({"content": "A"}, {"content": "B"})]
            for messages in (KEPT[:2], KEPT[:4]):
                await client.post("/v1/other/chat/completions", json={"messages": messages, "n": 2})

    asyncio.run(play())
    kept = {}
    for call in read_calls(tmp_path):
        kept.setdefault(call["conversation"], []).append(call["message"].get("content"))
    assert list(kept.values()) == [[None, "A"], [None, "B"]]


def test_a_reply_that_the_agent_writes_in_other_words_belongs_to_its_conversation(tmp_path):
    async def play():
        async with recording(tmp_path) as (client, _):
            for question in ("Who?", "Why?"):
                messages = [{"role": "user", "content": question}]
                for more in (
                    [],
                    [{"role": "assistant", "content": "I called search"}, {"role": "tool", "content": "Jaws."}],
                ):
                    messages += more
                    await client.post(CHAT, json={"messages": messages})

    asyncio.run(play())
    assert [call["conversation"] for call in read_calls(tmp_path)] == ["conversation-1"] * 2 + ["conversation-2"] * 2
