"""What exporters and importers share: a run's pairs, a folder of their own, and rows that cannot be used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.text import valid_unicode
from reasonrag.storage.files import claim_folder, lock, write_json, writing
from reasonrag.storage.parquet import Row, ShardWriter, read_shards
from reasonrag.storage.records import RowProblems, raw_rows
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import pair_schema

SPLITS = ("train", "test")
SET_ASIDE = "set_aside.jsonl"

_SHARD_ROWS = 50_000
_IMPORTED = "pairs.json"  # what `reasonrag pairs --out` writes beside its pairs, too


class Unusable(Exception):
    """A row; the message says what kind of problem it has."""


def read_pairs(run: Path) -> dict[str, Iterator[Row]]:
    """Rows of `tables.pair_schema` by split, of the splits that have any.

    Raises:
        RunError: no finished run.
        DataError: no pairs, or pairs of whole trajectories.
    """
    config, summary = read_run(run)
    if config.pairs.level == "trajectory":
        raise DataError(
            f"{run}: its pairs are whole trajectories, of several prompts each, and one pair of messages cannot hold "
            f"them; derive pairs of steps with `reasonrag pairs {run}`"
        )
    counted = summary.get("pairs") or {}
    found = {split: read_shards(run / "pairs", split, pair_schema()) for split in SPLITS if counted.get(split)}
    if not found:
        raise DataError(f"{run}: no pairs to export; build trees of more questions, or lower pairs.min_margin")
    return found


@contextlib.contextmanager
def output(out: Path, marker: str, *names: str) -> Iterator[dict[str, int]]:
    """A folder that this process alone writes to, and the counts that `marker` will hold.

    What an earlier writing left under `names` is removed: half of an old set beside half of a new one would pass for
    a whole.

    Args:
        out: a new folder, or one with `marker`, which is written first.
        marker: name of the file that says whose folder it is.
        names: patterns of all other files that will be written.

    Raises:
        RunError: other files are in the folder, it is in use, or it cannot be written.
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
    """Write one JSON object a line, there whole or not at all; returns how many. Without rows there is no file.

    What JSON does not know (a date of a foreign table) is written as text.
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


def import_rows(
    source: Path, out: Path, pair: Callable[[Mapping[str, Any]], Row], *, test: Path | None = None
) -> dict[str, int]:
    """Write a file's pairs to `out/train-*.parquet`, those of a held-out file to `out/test-*.parquet`.

    Rows that cannot be used are set aside: `set_aside.jsonl` holds each as it was, with its number and the reason. No
    split is made up: rows that name no question cannot be parted by question.

    Args:
        source: a .jsonl(.gz, .zst), .json (one list) or .parquet file.
        out: see `output`.
        pair: makes a row of `tables.pair_schema`, or raises `Unusable`.
        test: a file of the same layout.

    Raises:
        DataError: a file that cannot be read, or in which no row can be used (its rows are named).
        RunError: see `output`.
    """
    files = {"train": source} if test is None else {"train": source, "test": test}
    for file in files.values():
        if file.resolve().parent == out.resolve():
            raise RunError(f"{file} lies in {out}, the folder to be written; choose a new one for --out")
    aside: list[Row] = []
    with output(out, _IMPORTED, "train-*.parquet", "test-*.parquet", SET_ASIDE) as counts:
        for split, file in files.items():
            writer = ShardWriter(out, split, pair_schema(), shard_rows=_SHARD_ROWS)
            problems = RowProblems(str(file))
            for number, raw in raw_rows(file):
                try:
                    writer.add(pair(_mapping(raw)))
                except Unusable as reason:
                    problems.add(str(reason), number)
                    aside.append({"file": file.name, "row": number, "reason": str(reason), "given": raw})
            if not writer.rows:
                problems.check("No other rows are in it, so there is nothing to import.")
                raise DataError(f"{file}: no rows in it")
            writer.close()
            counts[split] = writer.rows
        counts["set_aside"] = write_json_lines(out / SET_ASIDE, aside)
    return counts


def text_pair(prompt: list[Row], chosen: str, rejected: str) -> Row:
    """A row of `tables.pair_schema` of which nothing but its messages is known."""
    unknown: Row = dict.fromkeys(pair_schema().names)
    return unknown | {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def _mapping(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise Unusable("not a JSON object")
    return raw
