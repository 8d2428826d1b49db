"""Data for the field's other tools and from them: a run's pairs and questions out, published preferences in.

An exporter turns a finished run into a folder of files; an importer turns a file, and a held-out one if there is one,
into a folder that `dpo train --data` reads. Both return counts, by split.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from reasonrag.publish.exchange import jsonl, llamafactory, proguide, trl, verl


class Importer(Protocol):
    """Reads preferences, writes `tables.pair_schema`."""

    def __call__(self, source: Path, out: Path, *, test: Path | None = None) -> dict[str, int]:
        """Returns counts: `train`, `test` where a held-out file was given, `set_aside`, and the importer's own."""
        ...


EXPORTERS: dict[str, Callable[[Path, Path], dict[str, int]]] = {
    "jsonl": jsonl.export,
    "llamafactory": llamafactory.export,
    "verl": verl.export,
}
IMPORTERS: dict[str, Importer] = {"proguide": proguide.import_pairs, "trl": trl.import_pairs}
