"""Ports of loopback."""

from __future__ import annotations

import socket
from contextlib import suppress


def keep_port(port: int = 0) -> socket.socket:
    """Return a socket at a port of loopback, a free one if it is 0: nobody else is given that port until it is closed.

    It refuses connections until a server listens there, which may do so with SO_REUSEADDR, as asyncio's and torch's do.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return kept


def refuses(port: int) -> bool:
    """Return whether nobody listens there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return False
    return True
