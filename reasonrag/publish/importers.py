"""Published preferences to a folder of pairs: what `dpo train --data` reads, kept as Parquet.

Rows are read as `dpo train` reads them (`dpo.preferences.read_row`) and written with our columns; columns that the
source lacks stay null. docs/publish.md names the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.text import redact_data, valid_unicode
from reasonrag.dpo.preferences import (
    CheckedRow,
    Contradictions,
    StepSides,
    TextSides,
    Unusable,
    known_columns,
    read_row,
)
from reasonrag.publish.exporters import output, write_json_lines
from reasonrag.storage.parquet import Row, ShardWriter
from reasonrag.storage.records import NO_OBJECT, RowProblems, raw_rows, text_id
from reasonrag.storage.tables import pair_schema

SET_ASIDE = "set_aside.jsonl"
_SHARD_ROWS = 50_000
_IMPORTED = "pairs.json"  # `reasonrag pairs --out` writes a file of this name with its pairs, too
_TEXT_COLUMNS = ("prompt", "chosen", "rejected")


def import_pairs(
    source: Path, out: Path, *, test: Path | None = None, log: Callable[[str], object] = print
) -> dict[str, int]:
    """Write a file's pairs to `out/train-*.parquet`, those of a held-out file to `out/test-*.parquet`.

    Unusable rows are set aside: `set_aside.jsonl` holds each one, with its number and the reason. Secrets are replaced
    in all rows. A single file is not split, because rows without question ids cannot be split by question.

    Args:
        source: a .jsonl(.gz, .zst), .json (one list) or .parquet file.
        out: a new folder, or that of an earlier import, which is replaced.
        test: a held-out file.
        log: receives a warning that names the first pairs that contradict each other.

    Returns:
        Rows by split, the number of rows `set_aside`, and of pairs that are `contradictory`. These are kept.

    Raises:
        DataError: a file cannot be read, or none of its rows is usable (the rows are named).
        RunError: the folder holds other files, or is in use.
    """
    files = {"train": source} if test is None else {"train": source, "test": test}
    for file in files.values():
        if file.resolve().parent == out.resolve():
            raise RunError(f"{file} lies in {out}, the folder to be written; choose a new one for --out")
    set_aside: list[Row] = []
    contradictions = Contradictions()
    with output(out, _IMPORTED, "train-*.parquet", "test-*.parquet", SET_ASIDE) as counts:
        for split, file in files.items():
            writer = ShardWriter(out, split, pair_schema(), shard_rows=_SHARD_ROWS)
            problems = RowProblems(str(file))
            for number, given in raw_rows(file):
                raw = redact_data(given, "an imported row")
                try:
                    if not isinstance(raw, dict):
                        raise Unusable(NO_OBJECT)
                    columns = known_columns(raw)
                    row = read_row(f"{file.name} row {number}", columns)
                    writer.add(as_pair(row, columns))
                    contradictions.add_row(row)
                except Unusable as reason:
                    problems.add(str(reason), number)
                    set_aside.append({"file": file.name, "row": number, "reason": str(reason), "given": raw})
            if not writer.rows:
                problems.check("The file has no other rows, so there is nothing to import.")
                raise DataError(f"{file}: no rows in it")
            writer.close()
            counts[split] = writer.rows
        counts["set_aside"] = write_json_lines(out / SET_ASIDE, set_aside)
        counts["contradictory"] = contradictions.same_content
    if text := str(contradictions):
        log(f"warning: {text}; all are kept")
    return counts


def as_pair(row: CheckedRow, raw: Mapping[str, Any]) -> Row:
    """Return a row of `tables.pair_schema`: plain texts become messages of the user and the assistant.

    `raw` are the columns of the row; others of that schema are kept, converted to their types.

    Raises:
        Unusable: the table cannot hold the row.
    """
    sides = row.sides
    if isinstance(sides, TextSides):
        texts = {
            "prompt": [{"role": "user", "content": sides.prompt}],
            "chosen": [{"role": "assistant", "content": sides.chosen}],
            "rejected": [{"role": "assistant", "content": sides.rejected}],
        }
    elif isinstance(sides, StepSides):
        if any(raw.get(name) is None for name in _TEXT_COLUMNS):
            raise Unusable("a pair of whole trajectories, or of steps without a prompt, does not fit into a row")
        texts = {name: raw[name] for name in _TEXT_COLUMNS}
    else:
        if any(sides.template.values()):
            raise Unusable("tools and chat_template_kwargs have no column in a pair")
        texts = {"prompt": sides.prompt, "chosen": sides.chosen, "rejected": sides.rejected}
    pair: Row = dict.fromkeys(pair_schema().names)
    for name, messages in texts.items():
        pair[name] = [_plain_message(name, message) for message in messages]
    for field in pair_schema():
        value = raw.get(field.name)
        if field.name not in _TEXT_COLUMNS and value is not None:
            pair[field.name] = _typed(field.name, field.type, value)
    return pair


def _plain_message(name: str, message: Mapping[str, Any]) -> Row:
    if any(message[further] for further in message.keys() - {"role", "content"}):
        raise Unusable(f"{name} has a message with more than a role and a content")
    return {"role": valid_unicode(message["role"]), "content": valid_unicode(message["content"])}


def _typed(name: str, type: Any, value: Any) -> Any:
    """Return a value as its column holds it."""
    import pyarrow as pa

    if name == "question_id":
        value = text_id(value)
    try:
        typed = pa.scalar(value, type).as_py()
        if isinstance(value, bool) or typed != typed:  # Arrow takes True as a number; NaN differs from itself
            raise ValueError
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise Unusable(f"{name} is not a value of type {type}") from None
    return typed
