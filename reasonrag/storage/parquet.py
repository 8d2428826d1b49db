"""Read and write Parquet tables.

Every Parquet file of ours is written whole or not at all, with page checksums that every read verifies.
Without them, most single-bit flips are read back as different data.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import DataError, RunError, check_limits
from reasonrag.core.text import excerpt
from reasonrag.storage.files import fsync_folder, naming, place, writing
from reasonrag.storage.tables import GRADE

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = dict[str, Any]

_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.parquet")
_BATCH_ROWS = 128
_GROUP_BYTES = 16 << 20  # of a row group in memory; a reader holds one, too
# Bytes in memory by bytes on disk, after the first 64 MiB. A prompt may stand in each row: small runs have 60.
_MOST_DECODED = 1000


def pack(rows: Sequence[Row], schema: pa.Schema) -> bytes:
    """Return rows as a compressed Arrow stream: ten times faster than JSON, and nearly a table already.

    Raises:
        ValueError, TypeError: a value is not of its column's type, or is NaN or infinite.
    """
    import pyarrow as pa
    import zstandard

    batch = _finite_batch(rows, schema)
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_batch(batch)
    return bytes(zstandard.compress(stream.getvalue()))


def unpack(blob: bytes) -> pa.RecordBatch:
    """Return the rows that were given to `pack`."""
    import pyarrow as pa
    import zstandard

    with pa.ipc.open_stream(zstandard.decompress(blob)) as reader:
        return reader.read_next_batch()


def _finite_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    batch = pa.RecordBatch.from_pylist(list(rows), schema=schema)
    if column := not_finite(batch):
        raise ValueError(f"{column} holds NaN or an infinity")
    return batch


def not_finite(batch: pa.RecordBatch) -> str:
    """Return the name of the first column, however deep, that holds NaN or an infinity; "" if none does."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name, values, _ in leaves(batch):
        if pa.types.is_floating(values.type) and not pc.all(pc.is_finite(values), min_count=0).as_py():
            return name
    return ""


def leaves(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array, pa.Array | None]]:
    """Yield the innermost arrays of each column, such as `prompt[].content`, with the row of every value.

    The rows are None if value and row have the same number.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        yield from _leaves(name, column, None)


def _leaves(name: str, array: pa.Array, rows: Any) -> Iterator[tuple[str, pa.Array, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    # A map is a list of key and value, but pyarrow flattens lists alone.
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])))
    if pa.types.is_list(array.type):
        # `[values]` the element of the list above to which each value belongs, then the row of that.
        parents = pc.list_parent_indices(array)
        inner = parents if rows is None else rows.take(parents)
        yield from _leaves(f"{name}[]", pc.list_flatten(array), inner)
    elif pa.types.is_struct(array.type):
        for field, values in zip(array.type, array.flatten(), strict=True):
            yield from _leaves(f"{name}.{field.name}", values, rows)
    else:
        yield name, array, rows


def write_parquet(path: Path, rows: Sequence[Row], schema: pa.Schema) -> None:
    """Write a Parquet file, whole or not at all; raise ValueError for NaN and infinities."""
    batch = _finite_batch(rows, schema)
    with _writer(path, schema) as writer:
        writer.write_batch(batch)


@contextlib.contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Open a Parquet file that gets its name when the block ends; if the block raises, never."""
    import pyarrow.parquet as pq

    # Dictionaries of prompts and token ids are given up at a megabyte, after they have doubled the work.
    form = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    with writing(path) as file, pq.ParquetWriter(file, schema, **form) as writer:
        yield writer


def read_parquet(path: Path, schema: pa.Schema) -> list[Row]:
    """Return the rows of a file, with its page checksums verified.

    Raises:
        DataError: the file is unreadable, damaged, or has another schema.
    """
    return [row for batch in read_batches(path, schema) for row in batch.to_pylist()]


class ShardWriter:
    """Writes `stem-00000-of-000NN.parquet` shards of at most `shard_rows` rows, with one row group in memory.

    Without rows it writes nothing, as `datasets` refuses an empty file;
    `keep_empty` writes one. The number of shards is known only at the end, so
    each gets a temporary name, and `close` renames them and deletes older shards.
    """

    def __init__(
        self, folder: Path, stem: str, schema: pa.Schema, *, shard_rows: int, keep_empty: bool = False
    ) -> None:
        self.rows = 0
        self._keep_empty = keep_empty
        self._folder = folder
        self._stem = stem
        self._schema = schema
        self._shard_rows = shard_rows
        self._pending: list[Row] = []  # not in Arrow's memory yet
        self._group: list[pa.RecordBatch] = []
        self._group_bytes = 0
        self._shard = contextlib.ExitStack()  # the open file
        self._writer: pq.ParquetWriter | None = None
        self._left = shard_rows  # rows that the shard still takes
        self._working: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f".{stem}-*"):  # left by a process that was killed
            unfinished.unlink()

    def add(self, row: Row) -> None:
        self._pending.append(row)
        self.rows += 1
        if len(self._pending) == _BATCH_ROWS:
            self._convert()

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add rows in the columns of the schema."""
        self._convert()
        self.rows += batch.num_rows
        self._collect(batch)

    def link(self, path: Path) -> None:
        """Take another writer's file as the next shard: a hard link, or a copy on a disk without links."""
        self._working.append(place(path, self._folder / f".{self._stem}-{len(self._working):05d}.parquet"))

    def close(self) -> list[Path]:
        """Write the pending rows and give the shards their names; return their paths."""
        self._convert()
        if self._group or (self._keep_empty and not self._working):
            self._write_group()
        self._end_shard()
        count = len(self._working)
        final = [self._folder / f"{self._stem}-{number:05d}-of-{count:05d}.parquet" for number in range(count)]
        for former in self._folder.glob(f"{self._stem}-*.parquet"):
            if _SHARD.fullmatch(former.name) and former not in final:  # a copy that a user made stays
                former.unlink()
        for source, target in zip(self._working, final, strict=True):
            source.replace(target)
            source.unlink(missing_ok=True)  # two names of one file: replacing one by the other does nothing
        fsync_folder(self._folder)
        return final

    def _convert(self) -> None:
        if self._pending:
            batch, self._pending = _finite_batch(self._pending, self._schema), []
            self._collect(batch)

    def _collect(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            # A slice copies nothing, so a batch may end one shard and begin the next.
            part, batch = batch.slice(0, self._left), batch.slice(self._left)
            self._group.append(part)
            self._group_bytes += part.nbytes
            self._left -= part.num_rows
            if not self._left or self._group_bytes >= _GROUP_BYTES:
                self._write_group()
            if not self._left:
                self._end_shard()

    def _write_group(self) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._working.append(self._folder / f".{self._stem}-{len(self._working):05d}.parquet")
            self._writer = self._shard.enter_context(_writer(self._working[-1], self._schema))
        if self._group:
            with naming(self._working[-1]):  # the shard's block is not the one that this raises in
                self._writer.write_table(pa.Table.from_batches(self._group))
            self._group, self._group_bytes = [], 0

    def _end_shard(self) -> None:
        self._shard.close()
        self._writer, self._left = None, self._shard_rows


def read_shards(
    folder: Path, stem: str, schema: pa.Schema, *, columns: Sequence[str] | None = None, question_id: str | None = None
) -> Iterator[Row]:
    """Yield the rows of all shards in order, reading one batch at a time; None reads all columns, or all questions.

    Raises:
        RunError: shards are missing.
        DataError: a shard is unreadable, damaged, or has another
            schema. Rows before the damage have been yielded.
    """
    for path in shard_paths(folder, stem):
        for batch in read_batches(path, schema, columns=columns, question_id=question_id):
            yield from batch.to_pylist()


def by_question(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Yield data set and id of each question, and its rows, which stand together."""
    for question, group in itertools.groupby(rows, key=lambda row: (row["dataset"], row["question_id"])):
        yield question, list(group)


def shard_paths(folder: Path, stem: str) -> list[Path]:
    """Return the paths of `stem-00000-of-000NN.parquet`, ..., in order; raise RunError if they are not the full set."""
    paths = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if copies := [path for path in paths if not _SHARD.fullmatch(path.name)]:
        raise RunError(f"{copies[0]} is a copy of a file beside it, or not of this folder; move it elsewhere")
    full_set = [f"{stem}-{number:05d}-of-{len(paths):05d}.parquet" for number in range(len(paths))]
    if not paths or [path.name for path in paths] != full_set:
        problem = f"{folder}/{stem}-*.parquet: {len(paths)} shards found, not the full set"
        raise RunError(f"{problem}; if this is the folder of a run, run build-tree again")
    return paths


def read_batches(
    path: Path, schema: pa.Schema | None, *, columns: Sequence[str] | None = None, question_id: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, `_BATCH_ROWS` at a time, with their page checksums verified, if it has any.

    Without a schema any is read. A column may be a field of a nested one, such as "passages.list.element.id".
    With a question, only row groups that hold it are read, of the others the column with the ids alone.

    Raises:
        DataError: the file is unreadable, damaged, or has another
            schema. Rows before the damage have been yielded.
    """
    import pyarrow.compute as pc

    with _opened(path) as file:
        names = file.schema_arrow.names
        if schema is not None and GRADE in schema.names and GRADE not in names:
            schema = schema.remove(schema.get_field_index(GRADE))
            columns = columns and [name for name in columns if name != GRADE]
        # Nested names and types too: the footer, which holds them, has no checksum.
        if schema is not None and not file.schema_arrow.equals(schema):
            raise DataError(f"{path.name} has columns {names}, not those of this version of reasonrag")
        most = (64 << 20) + _MOST_DECODED * path.stat().st_size
        left, groups = file.metadata.num_rows, list(range(file.num_row_groups))
        if question_id is not None:
            of_question = pc.field("question_id") == question_id
            groups = [n for n in groups if file.read_row_group(n, columns=["question_id"]).filter(of_question).num_rows]
            left = sum(file.metadata.row_group(n).num_rows for n in groups)
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns and list(columns)):
            batch.validate(full=True)  # else invalid UTF-8 fails later, at any reader
            left -= batch.num_rows
            if (most := most - batch.nbytes) < 0:
                raise ValueError(f"it unpacks to more than {_MOST_DECODED} times its size, which no rows do")
            batch = batch if question_id is None else batch.filter(of_question)
            # A reader gives the columns in the order of the file.
            yield batch if columns is None else batch.select([name.partition(".")[0] for name in columns])
        if left:  # a damaged footer may hide row groups
            raise ValueError(f"its footer and its rows differ by {abs(left)} rows")


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns; raise DataError if it is not a Parquet file."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file and verify its page checksums; raise one DataError for anything wrong with it."""
    import pyarrow.parquet as pq

    with _damage(path):
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder, a pipe or a device")
        # A file without checksums, as other tools write them, is read all the same.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                raise DataError(f"{path}: two of its columns have the same name; rename one")
            yield file


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    # ValueError: also a damaged name in invalid UTF-8.
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        check_limits(error)
        raise DataError(
            f"{path} cannot be read ({excerpt(str(error), 200)}); it is damaged or not Parquet; copy it "
            "again (a run's pairs: `reasonrag pairs`; its trees: the same build-tree command)"
        ) from error


def parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the 1-based number and the values of each row of a file with any columns; DataError if it is damaged."""
    with _damage(path):  # of a value that Python has no type for
        batches = (batch.to_pylist() for batch in read_batches(path, None))
        yield from enumerate(itertools.chain.from_iterable(batches), 1)
