"""A folder that holds exactly what goes up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import one_line
from reasonrag.storage.files import write_json, write_text
from reasonrag.training.folder import without_places


def place(source: Path, target: Path) -> None:
    """The very bytes of a file, linked where the file system can, else copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def place_json(value: Mapping[str, Any], target: Path) -> None:
    """A mapping without any place on a machine.

    Raises:
        DataError: it holds what is neither JSON nor text, such as NaN or half a character.
    """
    try:
        write_json(target, without_places(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{target.name} holds what JSON cannot say ({one_line(str(error))[:80]}); mend it") from error


def place_yaml(value: Mapping[str, Any], target: Path) -> None:
    """Settings without any place on a machine."""
    write_text(target, settings_text(value))


def settings_text(value: Mapping[str, Any]) -> str:
    """The same, as text."""
    import yaml

    return yaml.safe_dump(without_places(value), sort_keys=False, allow_unicode=True)


def files_of(folder: Path) -> list[str]:
    """Every file below a folder, by its path in there."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
