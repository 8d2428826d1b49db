"""A proxy that records the model calls of an agent, for `build-tree --recording`.

    python -m contrib.record --upstream https://api.openai.com/v1 --out recordings/agent --port 8020

The agent's base URL becomes http://127.0.0.1:8020/v1, or http://127.0.0.1:8020/c/NAME/v1 to name the conversation.
Chat completions, OpenAI's Responses and Anthropic's Messages are kept, all as chat completions. Without a name, a call
belongs to the conversation that its messages begin with: with messages and reply, or else with messages alone. Headers
are passed on and never kept: the agent's key goes to the model alone. Secrets in messages are kept as ***.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import aiohttp
import structlog
from aiohttp import web

from contrib.apis import APIS, Api, parse_replies
from reasonrag.core.calls import check_url
from reasonrag.core.errors import InputError
from reasonrag.core.settings import refuse_links
from reasonrag.core.text import parse_json, redact_data, valid_unicode
from reasonrag.storage.files import lock
from reasonrag.storage.inputs import CALLS, read_calls

log = structlog.get_logger()

Message = dict[str, Any]

# Of a connection rather than of a request, or set again by the client.
_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "expect"}
    | {"accept-encoding", "content-encoding"}  # a body arrives here unpacked
)
_NAMED = re.compile(r"/c/([^/]+)(/.*)")
_MAX_BODY_BYTES = 64 << 20
_MAX_SILENCE_S = 3600.0  # of the model
_UNREADABLE = (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError)


class Conversations:
    """Finds the conversation that a call continues."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}  # by a hash of the messages up to and including a reply
        self._ends: dict[str, str] = {}  # the hash of the last reply of each
        self._asked: dict[str, str] = {}  # by a hash of the messages of a request
        self._calls: dict[str, int] = {}

    def __str__(self) -> str:
        return f"{sum(self._calls.values())} calls of {len(self._calls)} conversations are kept"

    def add(self, request: Sequence[Message], reply: Message, name: str | None = None) -> tuple[str, int]:
        """Return the name of the conversation of a call, and how many calls of it came before this one."""
        digest, hashes = hashlib.sha256(), []
        for message in (*request, reply):
            digest.update(_stable(message))
            hashes.append(digest.hexdigest())
        if name is None:
            known = [key for key in hashes[: len(request)] if key in self._names]
            # Of several with the same calls so far, the first that was not continued.
            same = [name for name in self._names[known[-1]] if self._ends[name] == known[-1]] if known else []
            # Some agents write a reply in other words: then the messages before it are what is the same.
            asked = [self._asked[key] for key in hashes[: len(request) - 1] if key in self._asked]
            new = (f"conversation-{number}" for number in itertools.count(len(self._calls) + 1))
            if known:
                name = same[0] if same else self._names[known[-1]][-1]
            else:
                name = asked[-1] if asked else next(name for name in new if name not in self._calls)
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        self._names.setdefault(hashes[-1], []).append(name)
        self._ends[name] = hashes[-1]
        if request:
            self._asked[hashes[-2]] = name
        return name, number


def _stable(message: Message) -> bytes:
    """Return what agents send back unchanged. They drop other fields, or turn a null into an empty text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return json.dumps([message["role"], message.get("content") or "", calls]).encode()


class Recorder:
    """Forwards every request to `upstream`, and appends each finished call of a model to `calls.jsonl`."""

    def __init__(self, upstream: str, out: Path) -> None:
        check_url(upstream, example="https://api.openai.com/v1")
        self.upstream = upstream.rstrip("/")
        refuse_links(out)
        self.file = out / CALLS
        self.conversations, self.lost = Conversations(), 0
        self._responses: dict[str, list[Message]] = {}  # what the server has behind `previous_response_id`
        self._passed_on: set[str] = set()
        if self.file.exists():
            for row in read_calls(out):
                self.conversations.add(row["request"]["messages"], row["message"], row["conversation"])
            _end_last_line(self.file)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._open_session)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _open_session(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_MAX_SILENCE_S)
        jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar) as self.session:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        if "Origin" in request.headers:  # an agent has none, and a page of any site could reach this address
            raise web.HTTPForbidden(text="no web page may ask for a call")
        if re.sub(r":\d+$", "", request.host.lower()) not in ("127.0.0.1", "localhost", "[::1]"):
            raise web.HTTPBadRequest(text="the Host header is not a name of this machine")
        body = await request.read()
        named = _NAMED.fullmatch(request.raw_path)
        name, path = (unquote(named[1]), named[2]) if named else (None, request.raw_path)
        path = path.removeprefix("/v1")  # `upstream` ends in the version, as an agent's base URL does
        segments = re.split(r"[/\\]", unquote(path.partition("?")[0]))
        # "/v1@evil.example/" would become an address of another server, dot segments one above the upstream's path.
        if not path.startswith("/") or {".", ".."} & {*segments}:
            raise web.HTTPNotFound(text="ask below /v1/ or /c/NAME/v1/")
        api = self._api(request.method, path, body)
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in _NOT_FORWARDED]
        headers.append(("Accept-Encoding", "identity"))
        try:
            reply = await self.session.request(
                request.method, self.upstream + path, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{self.upstream} does not answer ({type(error).__name__})"
            log.warning(problem)
            raise web.HTTPBadGateway(text=problem) from error
        raw = bytearray()
        async with reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            if "Retry-After" in reply.headers:
                response.headers["Retry-After"] = reply.headers["Retry-After"]
            try:
                await _to_agent(response.prepare(request))
                async for piece in reply.content.iter_any():
                    if len(raw) <= _MAX_BODY_BYTES:
                        raw += piece
                    if response.prepared:
                        await _to_agent(response.write(piece))
            except (aiohttp.ClientError, OSError) as error:
                log.warning("the model's server broke off a reply, which is not kept", error=type(error).__name__)
                if request.transport is not None:  # or the agent would take a part for the whole
                    request.transport.abort()
                return response
        if len(raw) > _MAX_BODY_BYTES:
            log.warning(f"a reply of more than {_MAX_BODY_BYTES >> 20} MiB was passed on and is not kept")
        elif api is not None and reply.status == 200:
            self._save(api, body, bytes(raw), name)
        return response

    def _api(self, method: str, path: str, body: bytes) -> Api | None:
        """Return the API of a request that is kept; None if it is passed on only, which a line says once.

        Raises:
            HTTPBadRequest: it goes on with a conversation of which the server alone has the messages.
        """
        path = path.partition("?")[0]
        api = next((api for end, api in APIS.items() if path.endswith(end)), None)
        if api is None and method == "POST" and path not in self._passed_on:
            self._passed_on.add(path)
            log.warning(f"{path} is passed on and not kept: neither {', nor '.join(APIS)}")
        if api is APIS["/responses"]:
            with contextlib.suppress(*_UNREADABLE):  # then the server refuses it
                request = parse_json(body)
                known = request.get("previous_response_id") in (None, *self._responses)
                if request.get("conversation") or not known:
                    self._refuse(
                        "this response goes on with messages that only the server has; send them again in `input`"
                    )
        return api if method == "POST" else None

    def _refuse(self, why: str) -> NoReturn:
        log.error(f"refused: {why}")
        error = {"message": f"contrib.record: {why}", "type": "invalid_request_error"}
        raise web.HTTPBadRequest(text=json.dumps({"error": error}), content_type="application/json")

    def _save(self, api: Api, body: bytes, raw: bytes, name: str | None) -> None:
        try:
            asked = parse_json(body)
            request, replies = api.request(asked), parse_replies(api, raw)
            if api is APIS["/responses"]:
                begun = 1 if asked.get("instructions") else 0  # which are of this request alone
                request["messages"][begun:begun] = self._responses.get(asked.get("previous_response_id"), ())
                self._responses[replies[0].pop("id")] = [*request["messages"][begun:], replies[0]["message"]]
            name, number = self.conversations.add(request["messages"], replies[0]["message"], name)
            rows = [{"conversation": name, "call": number, "request": request, **replies[0]}]
            # Each other choice is a conversation, with the same calls before it.
            choices = {_stable(reply["message"]): reply for reply in reversed(replies)}
            del choices[_stable(replies[0]["message"])]
            for choice, reply in enumerate(choices.values(), 2):
                other, _ = self.conversations.add(
                    request["messages"], reply["message"], f"{name}-choice-{choice}-{number}"
                )
                before = [row for row in read_calls(self.file.parent) if row["conversation"] == name] if number else []
                rows += [*(row | {"conversation": other} for row in before), rows[0] | reply | {"conversation": other}]
            lines = [valid_unicode(json.dumps(row, ensure_ascii=False)) for row in redact_data(rows, "a recorded call")]
            size = self.file.stat().st_size if self.file.exists() else 0
            try:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in lines))
            except OSError:
                os.truncate(self.file, size)  # or the next call would go on with half a line
                raise
        except _UNREADABLE as error:
            log.warning("a call could not be read and is not kept", error=type(error).__name__)
        except OSError as error:
            self.lost += 1
            log.error("a call could not be written and is lost", error=error.strerror)


async def _to_agent(sending: Awaitable[object]) -> None:
    """Send something to the agent. If it has gone, its call goes on: it is paid for, and kept."""
    with contextlib.suppress(ConnectionError):
        await sending


def _end_last_line(file: Path) -> None:
    """End the last line, which an editor may have left open; cut it off if a kill left only a part of it."""
    content = file.read_bytes()
    start = content.rfind(b"\n") + 1
    try:
        parse_json(content[start:])
    except ValueError:
        os.truncate(file, start)
    else:
        with file.open("ab") as opened:
            opened.write(b"\n")


async def _end_on_signals(signals: list[int], app: web.Application) -> None:
    """End the server at Ctrl-C or SIGTERM, as aiohttp does; add the number of the signal to `signals`."""

    def end(number: int) -> NoReturn:
        signals[:] = [number]
        raise web.GracefulExit

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)


def main() -> None:
    """Record until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upstream", required=True, metavar="URL", help="base URL of the model's server")
    parser.add_argument("--out", required=True, type=Path, help="folder of calls.jsonl; the same command adds to it")
    parser.add_argument("--port", type=int, default=8020, help="where the agent finds it, on 127.0.0.1 (default: 8020)")
    given = parser.parse_args()
    upstream = urlsplit(given.upstream)
    if upstream.port == given.port and upstream.hostname in ("127.0.0.1", "localhost", "::1"):
        parser.error(f"--upstream {given.upstream} is this recorder itself; give the model's server, or another --port")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        with lock(given.out / ".lock"):  # a second recorder would cut off the line that this one is writing
            recorder = Recorder(given.upstream, given.out)
            begun = f"recording http://127.0.0.1:{given.port}/v1 into {recorder.file}; Ctrl-C ends it"
            app, signals = recorder.app(), list[int]()
            app.on_startup.append(functools.partial(_end_on_signals, signals))
            web.run_app(app, host="127.0.0.1", port=given.port, print=lambda listening: print(begun, flush=True))
            if recorder.lost:
                parser.exit(1, f"{recorder.lost} calls could not be written and are lost; the others are kept\n")
            print(recorder.conversations)
            sys.exit(128 + int(sum(signals)))
    except InputError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot record on port {given.port} into {given.out} ({error.strerror}); choose another")


if __name__ == "__main__":
    main()
