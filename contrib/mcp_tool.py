"""A search tool of an MCP server, started by a command or reached over streamable HTTP (`pip install 'mcp>=2'`).

    reasonrag build-tree --retriever python:contrib.mcp_tool:open_retriever --config search.yaml ...

Options: tool, command (a list) or url, environment (names of the variables that the command gets, and no others),
request (arguments of the tool; "{query}" and "{top_k}" stand for the values), results, id, title, text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import mcp
from mcp.client.streamable_http import streamable_http_client

from contrib.searching import QueryRetriever, field, needed, passages_of
from contrib.web import _filled
from reasonrag import Config, ConfigError, Passage, Question, RetrievalError


def open_retriever(config: Config, questions: list[Question]) -> QueryRetriever:
    """Open a tool. The session begins with the first search, and a new one begins after it broke."""
    options = config.retrieval.backend
    tool = needed(config, "tool")
    if not (command := options.get("command")):
        needed(config, "url")
    elif shutil.which(command[0]) is None:
        raise ConfigError(f"retrieval.backend.command: there is no command {command[0]!r} on this machine")
    request = options.get("request", {"query": "{query}"})
    # It logs a traceback for each line of a log that a server prints between its replies.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
    sessions: list[_Session] = []

    async def find(query: str, top_k: int) -> Sequence[Passage]:
        if not sessions:
            sessions.append(_Session(options))
        session = sessions[0]
        try:
            client = await asyncio.shield(session.client)
            reply = await client.call_tool(tool, _filled(request, {"{query}": query, "{top_k}": top_k}))
        except mcp.MCPError as error:
            if error.error.code in (mcp.types.INVALID_PARAMS, mcp.types.METHOD_NOT_FOUND):
                raise RetrievalError(f"the tool {tool} refuses", quoting=error, cause="refused") from error
            await _end(sessions)
            raise ConnectionError(str(error)) from error
        except Exception as error:
            await _end(sessions)
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        texts = [block.text for block in reply.content if block.type == "text"]
        if reply.is_error:
            raise ConnectionError(f"the tool {tool} failed: {' '.join(texts)[:200]}")
        return passages_of(_documents(reply.structured_content, texts, options), config)

    return QueryRetriever("mcp", config, find, close=lambda: _end(sessions))


def _documents(content: Any, texts: list[str], options: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Return what a tool found: a list in structured content or in JSON as text, or one passage for each text."""
    if len(texts) == 1 and content in (None, {"result": texts[0]}):  # the library repeats plain text as `result`
        try:
            content = json.loads(texts[0])
        except ValueError:
            content = None
    found = field(content, options.get("results", ""))
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), None)
    if not isinstance(found, list):
        found = [text for text in texts if text.strip()]
    rows = [{"text": item} if isinstance(item, str) else item for item in found]
    return [(field(row, options.get("id", "id")), row, field(row, options.get("score", "score"))) for row in rows]


class _Session:
    """A session. The library wants the same task to open and close it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.task = asyncio.create_task(self._hold(options))

    async def _hold(self, options: dict[str, Any]) -> None:
        try:
            async with AsyncExitStack() as stack:
                if command := options.get("command"):
                    given = {name: os.environ[name] for name in options.get("environment", ()) if name in os.environ}
                    process = mcp.StdioServerParameters(command=command[0], args=list(command[1:]), env=given)
                    errors = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115, PTH123, ASYNC230
                    transport = mcp.stdio_client(process, errlog=errors)
                else:
                    transport = streamable_http_client(options["url"])
                self.client.set_result(await stack.enter_async_context(mcp.Client(transport)))
                await self.over.wait()
        except Exception as error:
            if not self.client.done():
                self.client.set_exception(error)
                self.client.exception()  # marks it as retrieved, if the search was cancelled


async def _end(sessions: list[_Session]) -> None:
    while sessions:
        session = sessions.pop()
        session.over.set()
        if not session.client.done():  # the server never answered
            session.task.cancel()
        await asyncio.gather(session.task, return_exceptions=True)
