"""The file of a recording: a line for each call of an agent's model, which `reasonrag record` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError

CALLS = "calls.jsonl"


def read_calls(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield `conversation`, `call`, `request`, `message` and `finish_reason` of each call, in the order of the replies.

    A last line that a kill cut off is left out.

    Raises:
        DataError: the file cannot be read, or another line is no call.
    """
    file = folder / CALLS
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name a folder of `reasonrag record`") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            yield {key: row[key] for key in ("conversation", "call", "request", "message", "finish_reason")}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}, line {number} is no recorded call; was it edited?") from error
