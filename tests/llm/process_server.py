"""`python process_server.py PORT LATENCY_S`: a chat endpoint that answers with its port, in a process to be killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path


class ServerProcess:
    """The server in a process of its own, at a port that stays the same over kills and starts."""

    def __init__(self, latency_s: float = 0.02) -> None:
        self.latency_s = latency_s
        self.port = 0
        self.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        command = [sys.executable, "-S", str(Path(__file__)), str(self.port), str(self.latency_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def _serve(port: int, latency_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                await reader.readexactly(int(length or 0))
                await asyncio.sleep(latency_s)
                reply = {"choices": [{"message": {"content": str(port)}, "finish_reason": "stop"}]}
                raw = json.dumps(reply if length else {"data": [{"id": "m"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    port = server.sockets[0].getsockname()[1]
    print(port, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
