"""A proxy between an agent and its model that keeps each request and its reply, by conversation.

The agent's base URL becomes that of the proxy: http://127.0.0.1:PORT/v1, or http://127.0.0.1:PORT/c/NAME/v1, which
names the conversation. Without a name, a call belongs to the conversation whose messages, with the reply, its messages
begin with. Headers are passed on and never kept: the key of the agent goes from it to the model alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import aiohttp
import structlog

from reasonrag.core.documents import parse_json
from reasonrag.core.http import check_url, pieces
from reasonrag.core.secrets import redact_data
from reasonrag.core.serving import App, Endpoint, ListenSettings, Receive, Refusal, Response, Scope, run_app
from reasonrag.core.settings import setting
from reasonrag.core.text import valid_unicode
from reasonrag.storage.folder import Folder
from reasonrag.storage.records import CALLS, read_calls

log = structlog.get_logger()

Message = dict[str, Any]

# Of a connection, not of a request; or written anew by the client.
_NOT_PASSED_ON = frozenset(
    b"host connection keep-alive te trailer transfer-encoding upgrade content-length accept-encoding expect".split()
)
_NAMED = re.compile(r"/c/([^/]+)(/.*)")
_LONGEST_SILENCE_S = 3600.0  # of the model; its agent may long have left
_UNREADABLE = (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError)


class RecordSettings(ListenSettings):
    """Settings of `record`."""

    max_body_bytes: int = setting(64 << 20, "maximum bytes of a request's body, and of a reply's", ge=1)


class Conversations:
    """Finds the conversation that a call continues."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by a hash of the messages up to and including a reply
        self._calls: dict[str, int] = {}

    def add(self, request: Sequence[Message], reply: Message, name: str | None = None) -> tuple[str, int]:
        """Return the name of the conversation of a call, and how many calls of it came before this one."""
        digest, hashes = hashlib.sha256(), []
        for message in (*request, reply):
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            # What agents send back unchanged; they drop other fields, or turn a null into an empty text.
            kept = [message["role"], message.get("content") or "", [(f["name"], f["arguments"]) for f in functions]]
            digest.update(json.dumps(kept).encode())
            hashes.append(digest.hexdigest())
        if name is None:
            known = [self._names[key] for key in hashes[: len(request)] if key in self._names]
            name = known[-1] if known else f"conversation-{len(self._calls) + 1}"
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        self._names[hashes[-1]] = name
        return name, number


class Recorder(App):
    """Passes every request on to `upstream`; appends what a chat completion was asked and said to `calls.jsonl`."""

    def __init__(self, upstream: str, out: Path, settings: RecordSettings) -> None:
        super().__init__(settings, token=None)  # `Authorization` is the model's
        self._upstream = upstream.rstrip("/")
        self._file = out / CALLS
        self._conversations = Conversations()
        if self._file.exists():  # a kill may have cut off the last line
            whole = self._file.read_bytes().rfind(b"\n") + 1
            os.truncate(self._file, whole)
        for row in read_calls(out) if self._file.exists() else ():
            self._conversations.add(row["request"]["messages"], row["message"], row["conversation"])
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def route(self, scope: Scope) -> Endpoint:
        return self._forward

    async def _forward(self, scope: Scope, receive: Receive) -> Response:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_LONGEST_SILENCE_S)
            jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
        body = await self.body(scope, receive)
        asked = scope["raw_path"].decode("latin-1")
        named = _NAMED.fullmatch(asked)
        name, path = (unquote(named[1]), named[2]) if named else (None, asked)
        path = path.removeprefix("/v1")  # `upstream` ends in the version, as an agent's base URL does
        if not path.startswith("/"):  # "/v1@evil.example/" would become an address of another server
            raise Refusal(404, "there is nothing here; ask below /v1/ or /c/NAME/v1/")
        room = self._room(body) if path.endswith("/chat/completions") else None
        query = scope["query_string"].decode("latin-1")
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in _NOT_PASSED_ON]
        try:
            url = self._upstream + path + (f"?{query}" if query else "")
            headers.append(("Accept-Encoding", "identity"))
            reply = await self._session.request(scope["method"], url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise Refusal(502, f"{self._upstream} does not answer ({type(error).__name__})") from error
        kept = room if reply.status == 200 else None
        passed_on = {"Retry-After": reply.headers["Retry-After"]} if "Retry-After" in reply.headers else {}
        return Response(self._relayed(reply, body, name, kept), reply.status, reply.content_type, passed_on)

    async def _relayed(
        self, reply: aiohttp.ClientResponse, asked: bytes, name: str | None, room: IO[bytes] | None
    ) -> AsyncIterator[bytes]:
        """Yield the reply as it comes; keep the call once all of it was there."""
        raw = bytearray()
        async with reply:
            async for piece in pieces(reply, self.settings.max_body_bytes):
                raw += piece
                yield piece
        if room is not None:
            room.close()
            try:
                self._keep(parse_json(asked), said(bytes(raw)), name)
            except _UNREADABLE as error:
                log.warning("a call could not be read and is not kept", error=type(error).__name__)
            except OSError as error:
                log.error("a call could not be written and is lost", error=error.strerror)

    def _room(self, asked: bytes) -> IO[bytes]:
        """Return a file without a name that takes up what a call may need on disk; refuse the call if that is full."""
        try:
            room = tempfile.TemporaryFile(dir=self._file.parent)  # noqa: SIM115 -- until the reply has come
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(room.fileno(), 0, 2 * len(asked) + (1 << 20))
        except OSError as error:
            log.error("a call is refused, as it could not be kept", file=str(self._file), error=error.strerror)
            raise Refusal(507, f"this call could not be recorded ({error.strerror}): free some space") from error
        return room

    def _keep(self, request: dict[str, Any], reply: dict[str, Any], name: str | None) -> None:
        name, number = self._conversations.add(request["messages"], reply["message"], name)
        row = {"conversation": name, "call": number, "request": request, **reply}
        line = redact_data(valid_unicode(json.dumps(row, ensure_ascii=False)), "a recorded call").encode() + b"\n"
        with self._file.open("ab", buffering=0) as file:
            whole = file.tell()
            if file.write(line) < len(line):
                file.truncate(whole)  # the next line must not continue half of this one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def said(raw: bytes) -> dict[str, Any]:
    r"""Return `message`, `finish_reason` and `usage` of the first choice of a reply, streamed or not.

    >>> pieces = [{"delta": {"role": "assistant", "content": "<answer>"}}, {"delta": {"content": "Jaws"}}]
    >>> said("".join(f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces).encode())["message"]
    {'role': 'assistant', 'content': '<answer>Jaws'}

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: it is no chat completion.
    """
    if raw.lstrip().startswith(b"{"):
        reply = parse_json(raw)
        choice = reply["choices"][0]
        return {"message": choice["message"], "finish_reason": choice["finish_reason"], "usage": reply.get("usage")}
    message: Message = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason = usage = None
    for line in raw.decode("utf-8", "replace").replace("\r", "\n").split("\n"):  # U+2028 and U+0085 are text
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        chunk = parse_json(line.removeprefix("data:"))
        usage = chunk.get("usage") or usage
        for choice in [choice for choice in chunk.get("choices") or () if not choice.get("index")]:
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call |= {"id": part["id"]} if part.get("id") else {}
                for key, piece in (part.get("function") or {}).items():
                    call["function"][key] += piece or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"message": message, "finish_reason": finish_reason, "usage": usage}


def record(upstream: str, out: Path, settings: RecordSettings) -> int:
    """Record until SIGTERM or Ctrl-C, and return the exit code; see `run_app`.

    Raises:
        ConfigError, RunError, DataError: an address or a folder that cannot be used.
    """
    check_url(upstream, example="https://api.openai.com/v1")
    with Folder(out, "recording", CALLS).locked():
        return run_app(Recorder(upstream, out, settings), about=f"to {upstream}, calls in {out / CALLS}")
