"""Put files into the folder to upload, without any path or address of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.documents import to_yaml
from reasonrag.core.errors import DataError
from reasonrag.core.secrets import excerpt
from reasonrag.storage.files import write_json
from reasonrag.training.folder import without_places


def place_json(value: Mapping[str, Any], target: Path) -> None:
    """Write a mapping as JSON, without paths and addresses of this machine.

    Raises:
        DataError: it holds what JSON cannot express, such as NaN or half a character.
    """
    try:
        write_json(target, without_places(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{target.name} holds what JSON cannot say ({excerpt(str(error), 80)}); mend it") from error


def settings_text(value: Mapping[str, Any]) -> str:
    """Return settings as YAML, without paths and addresses of this machine."""
    return to_yaml(without_places(value))


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
