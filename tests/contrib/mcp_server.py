"""A search tool over MCP, in a process of its own: `python -m tests.contrib.mcp_server stdio` or `http PORT`."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer

from tests.e2e.world import pages

server = MCPServer("sea")


@server.tool()
def search(query: str, count: int = 3) -> list[dict[str, str]]:
    """Pages that share words with the query."""
    if query == "fail":
        raise RuntimeError("the index is being rebuilt")
    if query == "die":
        os._exit(3)
    words = set(query.lower().split())
    shared = [(len(words & set(page["contents"].lower().split())), page) for page in pages()]
    best = sorted((pair for pair in shared if pair[0]), key=lambda pair: -pair[0])[:count]
    return [{"id": page["id"], "contents": page["contents"]} for _, page in best]


@server.tool()
def read(query: str) -> str:
    """Words of the environment, as text."""
    return f"{query}\n{os.environ.get('SEA_KEY', 'no key')} {os.environ.get('OTHER_KEY', 'no other')}"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
