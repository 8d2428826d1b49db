"""Third-party code that the user asked for: by its Python path, or with a model."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import ConfigError, ReasonRAGError
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import map_texts


def import_plugin(path: str) -> Any:
    """Import the object that `[python:]PACKAGE.MODULE:NAME` names; raise ConfigError if that fails.

    It is looked for where Python looks, then in the working folder.
    """
    path = path.removeprefix("python:")
    module, _, name = path.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that installed packages come first
    with _explained(path, "imported", "write python:PACKAGE.MODULE:NAME of a module in this folder or on PYTHONPATH"):
        return getattr(import_module(module), name)


def make_plugin(path: str, members: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Return the object that the imported function makes; raise ConfigError if it lacks one of the members."""
    factory, path = import_plugin(path), path.removeprefix("python:")
    with _explained(path, "called", "name a class or function with the parameters that docs/extend.md says"):
        instance = factory(*args, **kwargs)
        missing = ", ".join(name for name in members if not hasattr(instance, name))
    if missing:
        problem = f"python:{path} returns {type(instance).__name__}, which lacks {missing}"
        raise ConfigError(f"{problem}; docs/extend.md says what has to be returned")
    return instance


def code_of(settings: Any) -> dict[str, dict[str, str]]:
    """Return a checksum of the code of the plug-ins in a tree of settings, for `Folder.keep_served`."""
    texts: list[str] = []
    map_texts(settings, texts.append)
    modules = {text.split(":")[1] for text in texts if text.startswith("python:")} & sys.modules.keys()
    files = [getattr(sys.modules[name], "__file__", None) for name in sorted(modules)]
    content = b"".join(Path(file).read_bytes() for file in files if file)
    return {"code": {"model": hashlib.sha256(content).hexdigest()[:16]}} if files else {}


def open_model(address: ModelAddress, config: object) -> Any:
    """Open a user's model: the factory at `python:PACKAGE.MODULE:FACTORY` gets the settings of the model."""
    return make_plugin(address.rest, ("name", "complete", "aclose"), config)


@contextmanager
def _explained(path: str, action: str, advice: str) -> Iterator[None]:
    """Raise what code of others raises as ConfigError with its place, SystemExit too; `advice` if it did not begin."""
    try:
        yield
    except ReasonRAGError:  # of our parts, which it uses
        raise
    except (Exception, SystemExit) as error:
        # SystemExit: a script without `if __name__ == "__main__"`
        # may end the process when it is imported.
        if place := place_of(error):
            advice = f"its code fails at {place}; mend it there"
        problem = f"python:{path} cannot be {action}: {advice}"
        raise ConfigError(problem, quoting=f"{type(error).__name__}: {error}") from error


def place_of(error: BaseException) -> str:
    """Return `FILE:LINE` of the code of others that raised an error; "" if only ours has."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno or 0}"
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("reasonrag", "importlib", "asyncio")
    ]
    # The innermost line of the file where it began: deeper files are mostly libraries.
    same_file = [position for position in lines if position[0] == lines[0][0]]
    return "{}:{}".format(*same_file[-1]) if same_file else ""


@cache
def trusted(model: str, is_allowed: bool) -> bool:
    """Return whether Python code that comes with a model may run; log it once for each model."""
    if is_allowed:
        structlog.get_logger().warning("Python code that comes with a model is run, as you asked", model=model)
    return is_allowed
