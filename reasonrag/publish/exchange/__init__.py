"""Exchange with other tools: export a run's pairs and questions, import published preferences.

An exporter turns a finished run into a folder of files; an importer turns a file and an optional held-out file into a
folder that `dpo train --data` reads. Both return the number of rows by split.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from reasonrag.publish.exchange import llamafactory, verl
from reasonrag.publish.exchange.base import export_json_lines
from reasonrag.publish.exchange.importers import import_proguide, import_trl


class Importer(Protocol):
    """Reads preferences, writes `tables.pair_schema`."""

    def __call__(self, source: Path, out: Path, *, test: Path | None = None) -> dict[str, int]:
        """Return counts: `train`, `test` if a held-out file was given, `set_aside`, and the importer's own."""
        ...


EXPORTERS: dict[str, Callable[[Path, Path], dict[str, int]]] = {
    "jsonl": export_json_lines,
    "llamafactory": llamafactory.export,
    "verl": verl.export,
}
IMPORTERS: dict[str, Importer] = {"proguide": import_proguide, "trl": import_trl}
