"""A table's shards as record batches: all there, of the expected schema, page checksums verified, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.errors import DataError, RunError
from reasonrag.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1_000


def shard_paths(folder: Path, stem: str) -> list[Path]:
    """`stem-00000-of-000NN.parquet` in order.

    Raises:
        RunError: no shard, or not all of them.
    """
    paths = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if not paths or [path.name for path in paths] != [
        f"{stem}-{place:05d}-of-{len(paths):05d}.parquet" for place in range(len(paths))
    ]:
        raise RunError(
            f"{folder.name}/{stem}-*.parquet: {len(paths)} shards found, not the full set; run build-tree again"
        )
    return paths


def verified_batches(path: Path, schema: pa.Schema, *, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """A file's rows, some at a time, or some columns of them.

    Raises:
        DataError: unreadable, damaged, or of another schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            if not file.schema_arrow.equals(schema):  # nested names too: the footer has no checksum
                raise DataError(f"{path.name} has columns {file.schema_arrow.names}, not those of this version")
            left = file.metadata.num_rows
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                left -= batch.num_rows
                yield batch
            if left:  # a damaged footer may hide row groups
                raise ValueError(f"its footer and its rows differ by {abs(left)} rows")
    except (OSError, ValueError, pa.ArrowException) as error:  # a damaged name is no UTF-8
        raise DataError(
            f"{path.name} cannot be read ({one_line(str(error))}); it is damaged or not Parquet: `reasonrag pairs` "
            "writes pairs anew, the same build-tree command trees"
        ) from error
