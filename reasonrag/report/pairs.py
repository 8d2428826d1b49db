"""The pair tables of a run, without their texts: the trees have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from reasonrag.storage.parquet import Row, read_shards
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema

_COLUMNS = (
    *("dataset", "question_id", "depth", "margin", "chosen_reward", "rejected_reward"),
    *("chosen_node_id", "rejected_node_id", "chosen_type", "rejected_type"),
)


def pairs(run: Path, level: str | None) -> Iterator[Row]:
    """Where each pair is from and why it is one, and its `split`; whole trajectories have no types.

    Args:
        run: folder of a finished run.
        level: of its pairs, "step" or "trajectory".

    Raises:
        RunError, DataError: the tables are not whole, damaged or of another level.
    """
    schema = trajectory_pair_schema() if level == "trajectory" else pair_schema()
    columns = [name for name in _COLUMNS if name in schema.names]
    for split in ("train", "test"):
        if any((run / "pairs").glob(f"{split}-*.parquet")):  # a split in which no question falls has no file
            for row in read_shards(run / "pairs", split, schema, columns=columns):
                yield row | {"split": split}
