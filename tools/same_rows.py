"""Compare the rows of two finished runs: `python -m tools.same_rows RUN_A RUN_B`.

For changes that must not change results: build the same trees before and after, then compare the node tables and the
pairs row by row. `config_hash` is ignored, and so is `pair_id`, which is a digest of it. The exit code is 1 if any
other column differs. A model in this process answers in batches whose size depends on timing, and the batch size moves
the last digits of its log-probabilities: add `--ignore logprobs` for such runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from itertools import zip_longest
from pathlib import Path

import click
import pyarrow.parquet as pq

TABLES = ("trees/nodes", "pairs/train", "pairs/test")
HASHED_COLUMNS = ("config_hash", "pair_id")

Row = dict[str, object]


def compare(first: Path, second: Path, ignored: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """Compare all tables of two run folders, without the ignored columns.

    Returns:
        The number of rows by table, and one line for each table that differs: its first different row and columns.

    Raises:
        FileNotFoundError: a folder has no node table, so it is not a finished run.
    """
    counts: dict[str, int] = {}
    differences: list[str] = []
    for table in TABLES:
        counts[table] = 0
        for left, right in zip_longest(_rows(first, table, ignored), _rows(second, table, ignored)):
            if left is None or right is None:
                longer = second if left is None else first
                differences.append(f"{table}: only {longer} has a row {counts[table]}")
                break
            # A column that only one side has is a difference as well.
            columns = sorted(name for name in left.keys() | right.keys() if _differs(left, right, name))
            if columns:
                differences.append(f"{table}: row {counts[table]} differs in {', '.join(columns)}")
                break
            counts[table] += 1
    return counts, differences


def _rows(run: Path, table: str, ignored: Collection[str]) -> Iterator[Row]:
    folder, stem = table.split("/")
    shards = sorted((run / folder).glob(f"{stem}-*.parquet"))
    if not shards and folder == "trees":
        raise FileNotFoundError(f"{run}: no {table}-*.parquet in it, so this is not a finished run")
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            for batch in file.iter_batches(1_000):
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if name not in ignored}


def _differs(left: Row, right: Row, name: str) -> bool:
    # By their text, so that NaN equals NaN and 1 differs from 1.0.
    return name not in left or name not in right or repr(left[name]) != repr(right[name])


@click.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("second", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--ignore", multiple=True, help="Also ignore this column (repeatable).")
def main(first: Path, second: Path, ignore: tuple[str, ...]) -> None:
    """Compare the node and pair rows of two run folders."""
    ignored = (*HASHED_COLUMNS, *ignore)
    try:
        counts, differences = compare(first, second, ignored)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"ignored columns: {', '.join(ignored)}")
    for table, count in counts.items():
        click.echo(f"{table}: {count} equal rows")
    for line in differences:
        click.echo(line)
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
