"""A run's pairs as plain JSON lines: TRL's columns and the provenance, as in the Parquet tables."""

from __future__ import annotations

from pathlib import Path

from reasonrag.publish.exchange.base import output, read_pairs, write_json_lines


def export(run: Path, out: Path) -> dict[str, int]:
    """Write `train.jsonl` and, where questions are held out, `test.jsonl`.

    Returns:
        Rows by split.

    Raises:
        RunError, DataError: see `base.read_pairs` and `base.output`.
    """
    pairs = read_pairs(run)
    with output(out, "jsonl-export.json", "train.jsonl", "test.jsonl") as counts:
        for split, rows in pairs.items():
            counts[split] = write_json_lines(out / f"{split}.jsonl", rows)
    return counts
