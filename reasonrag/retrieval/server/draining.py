"""Uvicorn, made to say when it is ready and to end by our rules."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn


class DrainingServer(uvicorn.Server):
    """The first signal lets requests in flight end, a second one ends the process.

    Attributes:
        signal: number of the one that came; 0 while none has.
    """

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None], on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_drain = on_drain
        self.signal = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's own, which kills the process by the same signal once it has drained."""
        if self.signal:
            os._exit(128 + sig)  # the search thread would keep the process
        self.signal = sig
        self._on_drain()
        self.should_exit = True
