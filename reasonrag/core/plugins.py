"""Your own formats, backends and retrievers, by the place where Python finds them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reasonrag.core.errors import ConfigError


def import_plugin(path: str) -> Any:
    """What `PACKAGE.MODULE:NAME` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"python:{path} cannot be imported ({error}); write python:PACKAGE.MODULE:NAME") from error
