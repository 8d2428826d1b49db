"""A proxy that records the model calls of an agent, for `build-tree --recording`.

    python -m contrib.record --upstream https://api.openai.com/v1 --out recordings/agent --port 8020

The agent's base URL becomes http://127.0.0.1:8020/v1, or http://127.0.0.1:8020/c/NAME/v1 to name the conversation.
Without a name, a call belongs to the conversation whose messages, with the reply, its messages begin with. Headers are
passed on and never kept: the agent's key goes to the model alone. Secrets in messages are kept as ***.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import structlog
from aiohttp import web

from reasonrag.core.calls import check_url
from reasonrag.core.errors import ConfigError, InputError
from reasonrag.core.text import parse_json, redact_data, valid_unicode
from reasonrag.storage.parquet import CALLS, read_calls

log = structlog.get_logger()

Message = dict[str, Any]

# Of a connection rather than of a request, or set again by the client.
_NOT_FORWARDED = frozenset(
    {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "expect"}
    | {"accept-encoding"}
)
_NAMED = re.compile(r"/c/([^/]+)(/.*)")
_MAX_BODY_BYTES = 64 << 20
_MAX_SILENCE_S = 3600.0  # of the model
_UNREADABLE = (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError)


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
            # What agents send back unchanged. They drop other fields, or turn a null into an empty text.
            stable = [message["role"], message.get("content") or "", [(f["name"], f["arguments"]) for f in functions]]
            digest.update(json.dumps(stable).encode())
            hashes.append(digest.hexdigest())
        if name is None:
            known = [self._names[key] for key in hashes[: len(request)] if key in self._names]
            name = known[-1] if known else f"conversation-{len(self._calls) + 1}"
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        self._names[hashes[-1]] = name
        return name, number


class Recorder:
    """Forwards every request to `upstream`, and appends each finished chat completion to `calls.jsonl`."""

    def __init__(self, upstream: str, out: Path) -> None:
        check_url(upstream, example=(example := "https://api.openai.com/v1"))
        if "?" in upstream or "#" in upstream:
            raise ConfigError(f"--upstream: no query can stand between it and the path of a call; give {example}")
        out.mkdir(parents=True, exist_ok=True)
        self.upstream = upstream.rstrip("/")
        self.file = out / CALLS
        self.conversations = Conversations()
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
        body = await request.read()
        named = _NAMED.fullmatch(request.raw_path)
        name, path = (unquote(named[1]), named[2]) if named else (None, request.raw_path)
        path = path.removeprefix("/v1")  # `upstream` ends in the version, as an agent's base URL does
        segments = re.split(r"[/\\]", unquote(path.partition("?")[0]))
        # "/v1@evil.example/" would become an address of another server, dot segments one above the upstream's path.
        if not path.startswith("/") or {".", ".."} & {*segments}:
            raise web.HTTPNotFound(text="ask below /v1/ or /c/NAME/v1/")
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in _NOT_FORWARDED]
        headers.append(("Accept-Encoding", "identity"))
        try:
            reply = await self.session.request(
                request.method, self.upstream + path, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise web.HTTPBadGateway(text=f"{self.upstream} does not answer ({type(error).__name__})") from error
        raw = bytearray()
        async with reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            if "Retry-After" in reply.headers:
                response.headers["Retry-After"] = reply.headers["Retry-After"]
            await response.prepare(request)
            async for piece in reply.content.iter_any():
                raw += piece
                await response.write(piece)
        if path.partition("?")[0].endswith("/chat/completions") and reply.status == 200:
            self._save(body, bytes(raw), name)
        return response

    def _save(self, body: bytes, raw: bytes, name: str | None) -> None:
        try:
            request, reply = parse_json(body), parse_reply(raw)
            name, number = self.conversations.add(request["messages"], reply["message"], name)
            row = {"conversation": name, "call": number, "request": request, **reply}
            line = redact_data(valid_unicode(json.dumps(row, ensure_ascii=False)), "a recorded call")
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except _UNREADABLE as error:
            log.warning("a call could not be read and is not kept", error=type(error).__name__)
        except OSError as error:
            log.error("a call could not be written and is lost", error=error.strerror)


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


def parse_reply(raw: bytes) -> dict[str, Any]:
    r"""Return `message`, `finish_reason` and `usage` of the first choice of a reply, streamed or not.

    >>> pieces = [{"delta": {"role": "assistant", "content": "<answer>"}}, {"delta": {"content": "Jaws"}}]
    >>> raw = "".join(f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces)
    >>> parse_reply(raw.encode())["message"]
    {'role': 'assistant', 'content': '<answer>Jaws'}
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
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue
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


def main() -> None:
    """Record until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upstream", required=True, metavar="URL", help="base URL of the model's server")
    parser.add_argument("--out", required=True, type=Path, help="folder of calls.jsonl; the same command adds to it")
    parser.add_argument("--port", type=int, default=8020)
    given = parser.parse_args()
    try:
        recorder = Recorder(given.upstream, given.out)
    except InputError as error:
        parser.error(str(error))
    web.run_app(recorder.app(), host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
