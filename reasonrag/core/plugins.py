"""Import custom formats, backends and retrievers by their Python path."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError


def import_plugin(path: str) -> Any:
    """Import the object that `PACKAGE.MODULE:NAME` names; raise ConfigError if that fails.

    It is looked for where Python looks, then in the working folder.
    """
    module, _, name = path.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that nothing there is imported in place of what is installed
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        what = "write python:PACKAGE.MODULE:NAME of a module in the working folder or on PYTHONPATH"
        raise ConfigError(f"python:{path} cannot be imported ({error}); {what}") from error
