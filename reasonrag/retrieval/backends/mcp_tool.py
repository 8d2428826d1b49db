"""A search tool of an MCP server, started by a command or reached over streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from reasonrag.core.config import BackendConfig, RetrievalConfig
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.http import Unavailable, check_url
from reasonrag.core.secrets import excerpt
from reasonrag.retrieval.backends import base
from reasonrag.retrieval.backends.base import LibraryBackend, Ranking

_REQUEST = {"query": "{query}"}
_READ_OF_ERRORS = 2_000  # characters at the end of what a server wrote to its stderr


def open_mcp(config: RetrievalConfig) -> LibraryBackend:
    """Open a tool, which is called for each query. Its session begins with the first one, and again if it breaks.

    Raises:
        ConfigError: the package mcp is missing, or it is not said which tool of which server.
    """
    mcp, names = base.library("mcp", config, "mcp>=2"), config.backend
    tool = base.needed(names.tool, config, "retrieval.backend.tool")
    command = base.needed(names.command or config.url, config, "retrieval.backend.command, or retrieval.url")
    headers = base.key_header(names)
    if not names.command:
        check_url(command[0], example="http://127.0.0.1:8000/mcp")
    sessions: list[_Session] = []  # the last one is open, unless it broke

    async def connect(stack: AsyncExitStack) -> Any:
        written = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        try:
            if names.command:
                given = {name: os.environ[name] for name in names.environment if name in os.environ}
                process = mcp.StdioServerParameters(command=command[0], args=list(command[1:]), env=given)
                transport = mcp.stdio_client(process, errlog=written)  # its words never reach the terminal
            else:
                http = base.library("httpx2", config, "mcp>=2").AsyncClient(headers=headers, timeout=config.timeout_s)
                over = base.library("mcp.client.streamable_http", config, "mcp>=2")
                transport = over.streamable_http_client(command[0], http_client=await stack.enter_async_context(http))
            client = await stack.enter_async_context(mcp.Client(transport))
            known = [found.name for found in (await client.list_tools()).tools]
        except Exception as error:
            written.seek(0)
            said = f"{base.first_of(error)} {written.read()[-_READ_OF_ERRORS:]}"
            begun = f"{command[0]}: " if names.command else ""
            raise ConnectionError(excerpt(f"{begun}{type(base.first_of(error)).__name__}: {said}")) from error
        if tool not in known:
            raise ConfigError(f"the MCP server has no tool {tool!r}", quoting=f"it has {', '.join(known)}")
        return client

    async def find(queries: list[str], top_k: int) -> list[Ranking]:
        if not sessions or sessions[-1].over.is_set():
            sessions.append(_Session(connect))
        session, rankings = sessions[-1], []
        try:
            client = await asyncio.shield(session.client)
            asked = [base.fill(names.request or _REQUEST, {"query": query, "top_k": top_k}) for query in queries]
            replies = [await client.call_tool(tool, arguments) for arguments in asked]
        except mcp.MCPError as error:
            if error.error.code in (mcp.types.INVALID_PARAMS, mcp.types.METHOD_NOT_FOUND):
                raise RetrievalError(f"the tool {tool} refuses", quoting=error, cause="refused") from error
            session.over.set()
            if error.error.code == mcp.types.CONNECTION_CLOSED:
                raise Unavailable("the session ended", cause="connection", away=True) from error
            raise
        except Exception:
            session.over.set()
            raise
        for reply in replies:
            texts = [block.text for block in reply.content if block.type == "text"]
            if reply.is_error:
                raise Unavailable(f"the tool {tool} failed ({excerpt(' '.join(texts))})", cause="tool_error")
            rankings.append(base.ranking(_documents(reply.structured_content, texts, names), names))
        return rankings

    async def close() -> None:
        for session in sessions:
            session.over.set()
            if not session.client.done():  # the server never answered
                session.task.cancel()
        await asyncio.gather(*(session.task for session in sessions), return_exceptions=True)

    opened = LibraryBackend(config, find, close=close)
    opened.checked = ()  # the tool is not called before it is needed, as that may cost something
    return opened


def _documents(value: Any, texts: list[str], names: BackendConfig) -> list[tuple[Any, Any, Any]]:
    """Return what a tool found: in structured content, in JSON as text, or in texts of which each is a passage."""
    if len(texts) == 1 and value in (None, {"result": texts[0]}):  # a tool that returns text has it twice
        try:
            value = json.loads(texts[0])
        except (ValueError, RecursionError):
            value = None
    if names.results or isinstance(value, list):
        return base.documents(value, names)
    lists = [inner for inner in value.values() if isinstance(inner, list)] if isinstance(value, Mapping) else []
    return base.documents(lists[0] if lists else [text for text in texts if text.strip()], names)


class _Session:
    """A session, which is opened and closed by one task, as the library wants it."""

    def __init__(self, connect: Callable[[AsyncExitStack], Awaitable[Any]]) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.task = asyncio.create_task(self._hold(connect))

    async def _hold(self, connect: Callable[[AsyncExitStack], Awaitable[Any]]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self.client.set_result(await connect(stack))
                await self.over.wait()
        except Exception as error:  # of a server that died, too: whoever calls it then gets his own
            self.over.set()
            if not self.client.done():
                self.client.set_exception(base.first_of(error))
                self.client.exception()  # marks it as retrieved, if nobody waits any more
