"""Requests, bodies, frames and replies that nobody wrote: our servers answer, or end the connection."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.faults.matrix import Figure, Rounds
from tests.faults.servers import HOST, SERVERS, SOCKET, app, ask, mutated, post, read_response
from tests.serving import serving

RETRIEVE = [
    json.dumps(body).encode()
    for body in (
        {"queries": ["Jaws", "Sælvig ☂"], "topk": 3, "return_scores": True},
        {"queries": [], "topk": None},
        {"queries": ["a" * 50], "return_scores": False, "other": {"a": [1, 2.5, None]}},
    )
]
SESSION = [
    json.dumps(message).encode()
    for message in (
        {"type": "reset", "data": {"question_id": "q1", "seed": 7, "episode_id": "e", "step": 3}},
        {"type": "reset", "data": {"question": "Who?", "golden_answers": ["me", "I"], "dataset": "mine"}},
        {"type": "step", "data": {"text": "<search>Jaws</search>", "finish_reason": "stop", "token_ids": [1, 2]}},
        {"type": "step", "data": {"text": "<answer>Steven Spielberg</answer>", "finish_reason": "length"}},
        {"type": "state"},
    )
]
CHAT = json.dumps(
    {
        "model": "m",
        "stream": False,
        "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "Jaws"},
        ],
    }
).encode()


@pytest.mark.fault("fuzz", "mutated bodies of /retrieve", "200, 413 or 422 each; never a 500, never a hang")
def test_mutated_bodies_of_retrieve(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    rng, statuses = random.Random(38), Counter[int]()
    with serving(app("index serve")) as port, socket.create_connection(("127.0.0.1", port), 60) as connection:
        for _ in range(rounds(1000, 30_000)):
            connection.sendall(post(b"/retrieve", mutated(rng, rng.choice(RETRIEVE))))
            statuses[read_response(connection)[0]] += 1
    figure(f"{statuses.total():,} bodies of /retrieve, answered with {shown(statuses)}")
    assert set(statuses) <= {200, 413, 422}


@pytest.mark.fault("fuzz", "mutated messages to sessions of env serve", "an answer to each; never an internal error")
def test_mutated_messages_of_sessions(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    rng, kinds = random.Random(38), Counter[str]()
    with serving(app("env serve")) as port, ExitStack() as stack:
        url = f"ws://127.0.0.1:{port}/ws"
        client = stack.enter_context(connect(url))
        for _ in range(rounds(600, 20_000)):
            sent = rng.choice(SESSION)
            sent = sent if rng.random() < 0.3 else mutated(rng, sent)
            client.send(sent, text=sent.isascii())
            try:
                reply = json.loads(client.recv(timeout=60))
            except ConnectionClosed:  # a mutation asked for that
                kinds["closed"] += 1
                client = stack.enter_context(connect(url))
                continue
            kinds[reply["data"].get("code", reply["type"])] += 1
            assert "internal error" not in reply["data"].get("message", ""), (sent, reply)
    figure(f"{kinds.total():,} messages of sessions, answered with {shown(kinds)}")
    assert set(kinds) <= {"observation", "state", "VALIDATION_ERROR", "EXECUTION_ERROR"}


@pytest.mark.fault(
    "fuzz", "mutated requests, headers and frames, to each server", "an answer or an end; no 500, no hang, no traceback"
)
@pytest.mark.parametrize("name", SERVERS)
def test_mutated_requests(
    name: str, tmp_path: Path, rounds: Rounds, figure: Figure, capfd: pytest.CaptureFixture[str]
) -> None:
    rng, statuses = random.Random(38), Counter[int]()
    frame = b"\x81\x90\0\0\0\0" + b'{"type":"state"}'
    requests = [post(b"/retrieve", RETRIEVE[0]), SOCKET + HOST + b"\r\n", SOCKET + HOST + b"\r\n" + frame * 3]
    requests.append(
        b"GET /health HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n"
        + HOST
        + b"\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with serving(app(name)) as port:
        for _ in range(rounds(150, 5000)):
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(mutated(rng, rng.choice(requests)))
                with suppress(OSError):  # it may be ended already
                    connection.shutdown(socket.SHUT_WR)
                statuses[read_response(connection)[0]] += 1
        alive = ask(port, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")[0]
    figure(f"{statuses.total():,} requests to {name}, answered with {shown(statuses)}")
    assert alive == 200 and all(status < 500 for status in statuses)
    assert "Traceback" not in capfd.readouterr().err


def shown(counts: Counter[Any]) -> str:
    """Return statuses or kinds of answers with their counts; status 0 is a connection that was closed without one."""
    return ", ".join(f"{key or 'closed'}: {count:,}" for key, count in sorted(counts.items(), key=str))
