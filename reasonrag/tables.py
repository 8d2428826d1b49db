"""Parquet: explicit schemas, atomic checksummed writes, verified reads.

Schemas are never inferred: one shard whose column is all null would otherwise get another type, and `load_dataset`
over the shards would fail. Page checksums are written and verified: without them most single-bit flips read back as
other data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.errors import DataError, RunError
from reasonrag.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


@cache
def tree_schema() -> pa.Schema:
    """One row a node. `spre` and `value` are null where the node has none; ids count from 0 within a question."""
    import pyarrow as pa

    return pa.schema(
        [
            ("dataset", pa.string()),
            ("question_id", pa.string()),
            ("question", pa.string()),
            ("golden_answers", pa.list_(pa.string())),
            ("node_id", pa.int32()),
            ("parent_id", pa.int32()),  # -1 at the root
            ("depth", pa.int32()),  # steps from the root
            ("origin", pa.string()),  # root | expansion | rollout
            ("stage", pa.string()),  # reasoning | grounding | terminal: what comes next
            ("action", pa.string()),  # query | evidence | answer | malformed; empty at the root
            ("content", pa.string()),  # what stands inside the tag; the reason of a malformed step
            ("stop_reason", pa.string()),  # answered | forced_answer | no_answer; null while unfinished
            ("prompt", _messages()),  # what the policy was asked; empty at the root
            ("prefix", pa.string()),  # of the turn that was already open
            ("stop", pa.list_(pa.string())),
            ("text", pa.string()),  # what it wrote
            ("finish_reason", pa.string()),
            ("token_ids", pa.list_(pa.int32())),  # [T] as sampled; null where the backend reports none
            ("logprobs", pa.list_(pa.float32())),  # [T]
            ("prompt_tokens", pa.int32()),
            ("completion_tokens", pa.int32()),
            ("passages", pa.list_(_passage())),  # best first
            ("visits", pa.int32()),  # N
            ("valued", pa.int32()),  # visits that had a value to back up
            ("value", pa.float64()),  # Q
            ("spre", pa.float64()),
            ("f1", pa.float64()),  # of the final answer; null elsewhere
            ("em", pa.float64()),
        ]
    )


@cache
def pair_schema() -> pa.Schema:
    """One row a preference: TRL's conversational `prompt`, `chosen`, `rejected`, then flat provenance."""
    import pyarrow as pa

    return pa.schema(
        [
            ("prompt", _messages()),
            ("chosen", _messages()),
            ("rejected", _messages()),
            ("pair_id", pa.string()),
            ("question_id", pa.string()),
            ("dataset", pa.string()),
            ("depth", pa.int32()),  # steps before the decision, 0 at the root
            ("chosen_type", pa.string()),  # query | evidence | answer
            ("rejected_type", pa.string()),  # query | evidence | answer | malformed
            ("chosen_end", pa.string()),  # stop: at a stop string | turn: the policy ended its turn | length: cut off
            ("rejected_end", pa.string()),
            ("chosen_reward", pa.float64()),
            ("rejected_reward", pa.float64()),
            ("margin", pa.float64()),
            ("chosen_visits", pa.int32()),
            ("rejected_visits", pa.int32()),
            ("parent_node_id", pa.int32()),
            ("chosen_node_id", pa.int32()),
            ("rejected_node_id", pa.int32()),
            ("prompt_tokens", pa.int32()),  # null where the backend reports none
            ("policy", pa.string()),
            ("config_hash", pa.string()),
        ]
    )


@cache
def trajectory_pair_schema() -> pa.Schema:
    """One row a preference between two whole trajectories of a question: what an outcome reward can tell."""
    import pyarrow as pa

    step = pa.struct([("prompt", _messages()), ("prefix", pa.string()), ("text", pa.string()), ("end", pa.string())])
    return pa.schema(
        [
            ("chosen_steps", pa.list_(step)),  # from the first step in which the two differ
            ("rejected_steps", pa.list_(step)),
            ("pair_id", pa.string()),
            ("question_id", pa.string()),
            ("dataset", pa.string()),
            ("depth", pa.int32()),  # steps that they share
            ("chosen_reward", pa.float64()),
            ("rejected_reward", pa.float64()),
            ("margin", pa.float64()),
            ("chosen_node_id", pa.int32()),
            ("rejected_node_id", pa.int32()),
            ("policy", pa.string()),
            ("config_hash", pa.string()),
        ]
    )


@cache
def trajectory_schema() -> pa.Schema:
    """One row an attempt at a question, with its scores and everything that was asked, written and found."""
    import pyarrow as pa

    step = pa.struct(
        [
            ("action", pa.string()),  # query | evidence | answer | malformed
            ("content", pa.string()),  # what stands inside the tag; the reason of a malformed step
            ("prompt", _messages()),
            ("prefix", pa.string()),
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("completion_tokens", pa.int32()),
            ("passages", pa.list_(_passage())),  # best first
        ]
    )
    return pa.schema(
        [
            ("dataset", pa.string()),
            ("question_id", pa.string()),
            ("question", pa.string()),
            ("golden_answers", pa.list_(pa.string())),
            ("kind", pa.string()),  # type of question; empty where the data set names none
            ("hops", pa.int32()),  # searches that the question needs; null where unknown
            ("answer", pa.string()),  # null where the trajectory ended without one
            ("stop_reason", pa.string()),  # answered | forced_answer | no_answer
            ("em", pa.float64()),
            ("f1", pa.float64()),
            ("acc", pa.float64()),
            ("retrievals", pa.int32()),
            ("steps", pa.int32()),
            ("forced", pa.int32()),  # 1 where the answer was forced at the step limit
            ("format_rate", pa.float64()),  # 1 where it is well-formed
            ("prompt_tokens", pa.int64()),  # null where the backend reports none
            ("completion_tokens", pa.int64()),
            ("well_formed", pa.bool_()),  # by the format's own checker
            ("reason", pa.string()),  # why it is not; empty where it is
            ("lasj", pa.bool_()),  # a judge's verdict on the answer; null without one, as the next four
            ("steps_over", pa.int32()),  # needless searches
            ("searches_known", pa.int32()),  # searches of which it is known whether they were needless
            ("steps_under", pa.int32()),  # false steps without a search
            ("own_steps_known", pa.int32()),
            ("trajectory", pa.list_(step)),
        ]
    )


def rollout_schema() -> pa.Schema:
    """One trajectory of online training a row, with all that its reward is made of (`OUT/rollouts`)."""
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.int32()),  # the optimizer step that it was made for, from 1
            ("dataset", pa.string()),
            ("question_id", pa.string()),
            ("sample", pa.int32()),  # within its group
            ("reward", pa.float64()),  # null without a verdict; `cause` says why
            ("advantage", pa.float64()),  # within its group, divided by the group's standard deviation
            ("cause", pa.string()),
            ("parts", pa.map_(pa.string(), pa.float64())),
            ("well_formed", pa.bool_()),
            ("reason", pa.string()),  # why it is not well-formed
            ("answer", pa.string()),
            ("stop_reason", pa.string()),
            ("question", pa.string()),
            ("golden_answers", pa.list_(pa.string())),
            ("turn", pa.string()),  # the policy's words and what was put in between
            ("tokens", pa.int32()),
            ("policy_tokens", pa.int32()),
            ("truncated", pa.bool_()),
        ]
    )


@cache
def plan_schema() -> pa.Schema:
    """One row a question that has a reference plan (Search-P1, eq. 5)."""
    import pyarrow as pa

    return pa.schema(
        [
            ("dataset", pa.string()),
            ("question_id", pa.string()),
            ("planner", pa.string()),  # in words
            ("steps", pa.list_(pa.string())),  # what has to be searched for, in order
            ("candidates", pa.int32()),  # that could be read
            ("correct", pa.int32()),  # of them, those whose answer is right
            ("votes", pa.int32()),  # candidates that were voted on; 0 where there was nothing to vote on
        ]
    )


def _messages() -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def _passage() -> pa.DataType:
    import pyarrow as pa

    return pa.struct([("id", pa.string()), ("contents", pa.string()), ("score", pa.float64())])


def write_parquet(path: Path, rows: Sequence[Row], schema: pa.Schema) -> None:
    """Write rows so that the file is there whole or not at all: temporary file, fsync, rename, fsync of the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            table = pa.Table.from_pylist(list(rows), schema=schema)
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_parquet(path: Path, schema: pa.Schema) -> list[Row]:
    """The rows of a file, its page checksums verified.

    Raises:
        DataError: unreadable, damaged, or of another schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
    except (OSError, ValueError, pa.ArrowException) as error:  # a damaged name is no UTF-8
        raise DataError(f"{path.name} cannot be read ({one_line(str(error))}); it is damaged or not Parquet") from error
    if not table.schema.equals(schema):  # nested names too: the footer has no checksum
        raise DataError(f"{path.name} has columns {table.schema.names}, not those of this version of reasonrag")
    rows: list[Row] = table.to_pylist()
    return rows


class ShardWriter:
    """Writes `stem-00000-of-000NN.parquet` shards of at most `shard_rows` rows.

    Without rows there is no shard, as `datasets` refuses a file without rows; with `keep_empty` there is one. How many
    shards there are is known only at the end, so each is written under a working name and renamed by `close`, which
    also drops the shards of an earlier writing.
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
        self._pending: list[Row] = []
        self._working: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f".{stem}-*"):  # of a process that was killed
            unfinished.unlink()

    def add(self, row: Row) -> None:
        """Take one more row."""
        self.rows += 1
        self._pending.append(row)
        if len(self._pending) == self._shard_rows:
            self._flush()

    def close(self) -> list[Path]:
        """Write what is pending and give the shards their names; returns their paths."""
        if self._pending or (self._keep_empty and not self._working):
            self._flush()
        count = len(self._working)
        final = [self._folder / f"{self._stem}-{i:05d}-of-{count:05d}.parquet" for i in range(count)]
        for old in set(self._folder.glob(f"{self._stem}-*.parquet")) - set(final):
            old.unlink()
        for source, target in zip(self._working, final, strict=True):
            source.replace(target)
        fsync_folder(self._folder)
        return final

    def _flush(self) -> None:
        self._working.append(self._folder / f".{self._stem}-{len(self._working):05d}.parquet")
        write_parquet(self._working[-1], self._pending, self._schema)
        self._pending = []


def read_shards(folder: Path, stem: str, schema: pa.Schema) -> Iterator[Row]:
    """The rows of every shard, in order.

    Raises:
        RunError: no shard, or not all of them.
    """
    paths = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if not paths or f"-of-{len(paths):05d}.parquet" not in paths[0].name:
        raise RunError(
            f"{folder.name}/{stem}-*.parquet: {len(paths)} shards found, not the full set; run build-tree again"
        )
    for path in paths:
        yield from read_parquet(path, schema)


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
