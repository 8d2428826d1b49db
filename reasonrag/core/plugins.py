"""Import custom formats, backends and retrievers by their Python path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reasonrag.core.errors import ConfigError


def import_plugin(path: str) -> Any:
    """Import the object that `PACKAGE.MODULE:NAME` names.

    Raises:
        ConfigError: the import fails.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"python:{path} cannot be imported ({error}); write python:PACKAGE.MODULE:NAME") from error
