"""The token that a retrieval server asks its clients for, in an environment variable on both sides."""

from __future__ import annotations

import os

from reasonrag.core.errors import ConfigError

TOKEN_ENV = "REASONRAG_TOKEN"


def read_token(variable: str) -> str | None:
    """The token in an environment variable; None where it is not set or empty.

    Raises:
        ConfigError: it holds what cannot stand in a header. The value is not shown.
    """
    token = os.environ.get(variable) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"the token in {variable} has to be of printable ASCII characters without spaces")
    return token
