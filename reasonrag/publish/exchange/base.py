"""What exporters and importers share: a run's pairs, and an output folder that is complete or marked as not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import valid_unicode
from reasonrag.storage.files import claim_folder, lock, write_json, writing
from reasonrag.storage.parquet import Row, read_shards
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import pair_schema

SPLITS = ("train", "test")


def read_pairs(run: Path) -> dict[str, Iterator[Row]]:
    """Return a run's rows of `tables.pair_schema` by split, without splits that are empty.

    Raises:
        RunError: the run is not finished.
        DataError: the run has no pairs, or pairs of whole trajectories.
    """
    config, summary = read_run(run)
    if config.pairs.level == "trajectory":
        raise DataError(
            f"{run}: its pairs are whole trajectories, of several prompts each, and one pair of messages cannot hold "
            f"them; derive pairs of steps with `reasonrag pairs {run}`"
        )
    counted = summary.get("pairs") or {}
    pairs_by_split = {split: read_shards(run / "pairs", split, pair_schema()) for split in SPLITS if counted.get(split)}
    if not pairs_by_split:
        raise DataError(f"{run}: no pairs to export; build trees of more questions, or lower pairs.min_margin")
    return pairs_by_split


@contextlib.contextmanager
def output(out: Path, marker: str, *names: str) -> Iterator[dict[str, int]]:
    """Open a folder that only this process writes to; the yielded counts are written to `marker` at the end.

    Files of an earlier run under `names` are removed first: half of an old set beside half of a new one would look
    complete.

    Args:
        out: a new folder, or one with `marker`, which is written first.
        marker: name of the file that says which exporter owns the folder.
        names: patterns of all other files that will be written.

    Raises:
        RunError: the folder holds other files, is in use, or cannot be written.
    """
    begun = [path.name for path in out.glob(f".{marker}.*")]
    claim_folder(out, marker, already_ours=(out / marker).exists(), ignore=begun)
    with lock(out / ".lock"):
        write_json(out / marker, {})
        for pattern in (f".{marker}.*", *names, *(f".{name}*" for name in names)):
            for old in out.glob(pattern):
                old.unlink()
        counts: dict[str, int] = {}
        yield counts
        write_json(out / marker, counts)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line, atomically; return how many. Without rows no file is written.

    Values that JSON cannot hold, such as dates of a foreign table, are written as text.
    """
    remaining = iter(rows)
    first = next(remaining, None)
    if first is None:
        return 0
    count = 0
    with writing(path) as file:
        for row in chain([first], remaining):
            count += 1
            line = json.dumps(row, ensure_ascii=False, default=str)
            file.write(valid_unicode(line).encode() + b"\n")
    return count


def export_json_lines(run: Path, out: Path) -> dict[str, int]:
    """Write a run's pairs as `train.jsonl` and, if questions are held out, `test.jsonl`, columns as in the tables.

    Returns:
        Rows by split.

    Raises:
        RunError, DataError: see `read_pairs` and `output`.
    """
    pairs = read_pairs(run)
    with output(out, "jsonl-export.json", "train.jsonl", "test.jsonl") as counts:
        for split, rows in pairs.items():
            counts[split] = write_json_lines(out / f"{split}.jsonl", rows)
    return counts
