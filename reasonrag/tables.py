"""Parquet: explicit schemas, atomic checksummed writes, verified reads.

Schemas are never inferred: one shard whose column is all null would otherwise get another type, and `load_dataset`
over the shards would fail. Page checksums are written and verified: without them most single-bit flips read back as
other data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.errors import DataError, RunError
from reasonrag.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Column = tuple[str, "pa.DataType", str]  # name, type, meaning

_BATCH_ROWS = 128


class Described:
    """A table's Arrow schema, when called; its columns with their meanings, which `docs/schema.md` is written from."""

    def __init__(self, columns: Callable[[Any], list[Column]]) -> None:
        self._columns = columns  # given pyarrow, which is imported when the first schema is asked for
        self.__doc__ = columns.__doc__

    def __call__(self) -> pa.Schema:
        """Names and types alone: meanings are for readers, not for files."""
        return self._schema

    @cached_property
    def columns(self) -> list[Column]:
        """In order."""
        import pyarrow as pa

        return self._columns(pa)

    @cached_property
    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([(name, type) for name, type, _ in self.columns])


@Described
def message(pa: Any) -> list[Column]:
    """One message of a chat, as TRL and chat templates have it."""
    return [("role", pa.string(), "system | user | assistant"), ("content", pa.string(), "the text")]


@Described
def passage(pa: Any) -> list[Column]:
    """One passage that a search found."""
    return [
        ("id", pa.string(), "its id in the corpus"),
        ("contents", pa.string(), "title, newline, text"),
        ("score", pa.float64(), "the retriever's; comparable within one search only"),
    ]


@Described
def pair_step(pa: Any) -> list[Column]:
    """One step of a trajectory that is compared as a whole."""
    return [
        ("prompt", _list(message), "what the policy was asked"),
        ("prefix", pa.string(), "of the turn that was already open"),
        ("text", pa.string(), "what it wrote"),
        ("end", pa.string(), "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
    ]


@Described
def step(pa: Any) -> list[Column]:
    """One step of an attempt."""
    return [
        ("action", pa.string(), "query | evidence | answer | malformed"),
        ("content", pa.string(), "what stands inside the tag; the reason of a malformed step"),
        ("prompt", _list(message), "what the policy was asked"),
        ("prefix", pa.string(), "of the turn that was already open"),
        ("text", pa.string(), "what it wrote"),
        ("finish_reason", pa.string(), "stop | length | ..., as the backend says"),
        ("prompt_tokens", pa.int32(), "null where the backend reports none"),
        ("completion_tokens", pa.int32(), "null where the backend reports none"),
        ("passages", _list(passage), "what its search found, best first"),
    ]


@Described
def tree_schema(pa: Any) -> list[Column]:
    """One row a node. `spre` and `value` are null where the node has none; ids count from 0 within a question."""
    return [
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("question_id", pa.string(), "the question's id there"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "any of them is right"),
        ("node_id", pa.int32(), "within the question; 0 is the root"),
        ("parent_id", pa.int32(), "-1 at the root"),
        ("depth", pa.int32(), "steps from the root"),
        ("origin", pa.string(), "root | expansion | rollout"),
        ("stage", pa.string(), "reasoning | grounding | terminal: what comes next"),
        ("action", pa.string(), "query | evidence | answer | malformed; empty at the root"),
        ("content", pa.string(), "what stands inside the tag; the reason of a malformed step"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer; null while unfinished"),
        ("prompt", _list(message), "what the policy was asked; empty at the root"),
        ("prefix", pa.string(), "of the turn that was already open"),
        ("stop", pa.list_(pa.string()), "stop strings of the request"),
        ("text", pa.string(), "what the policy wrote"),
        ("finish_reason", pa.string(), "stop | length | ..., as the backend says"),
        ("token_ids", pa.list_(pa.int32()), "[T] as sampled; null where the backend reports none"),
        ("logprobs", pa.list_(pa.float32()), "[T] natural logarithms; null where the backend reports none"),
        ("prompt_tokens", pa.int32(), "null where the backend reports none"),
        ("completion_tokens", pa.int32(), "null where the backend reports none"),
        ("passages", _list(passage), "what its search found, best first"),
        ("visits", pa.int32(), "N"),
        ("valued", pa.int32(), "visits that had a value to back up"),
        ("value", pa.float64(), "Q, the mean of the values backed up"),
        ("spre", pa.float64(), "mean over the complete trajectories through the node of F1 * alpha**steps"),
        ("f1", pa.float64(), "of the final answer; null elsewhere"),
        ("em", pa.float64(), "of the final answer; null elsewhere"),
    ]


@Described
def pair_schema(pa: Any) -> list[Column]:
    """One row a preference: TRL's conversational `prompt`, `chosen`, `rejected`, then flat provenance."""
    return [
        ("prompt", _list(message), "what both were asked; an open turn is its last message"),
        ("chosen", _list(message), "the step of the higher reward, one message"),
        ("rejected", _list(message), "its sibling, one message"),
        ("pair_id", pa.string(), "unique within the data set"),
        ("question_id", pa.string(), "of the question; all its pairs are in one split"),
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("depth", pa.int32(), "steps before the decision, 0 at the root"),
        ("chosen_type", pa.string(), "query | evidence | answer"),
        ("rejected_type", pa.string(), "query | evidence | answer | malformed"),
        ("chosen_end", pa.string(), "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
        ("rejected_end", pa.string(), "as chosen_end"),
        ("chosen_reward", pa.float64(), "SPRE, or the judge's value where `pairs.reward` is judge"),
        ("rejected_reward", pa.float64(), "as chosen_reward; lower"),
        ("margin", pa.float64(), "chosen_reward - rejected_reward"),
        ("chosen_visits", pa.int32(), "N of the chosen node"),
        ("rejected_visits", pa.int32(), "N of the rejected node"),
        ("parent_node_id", pa.int32(), "node_id of the node at which they part"),
        ("chosen_node_id", pa.int32(), "node_id in the trees"),
        ("rejected_node_id", pa.int32(), "node_id in the trees"),
        ("prompt_tokens", pa.int32(), "null where the backend reports none"),
        ("policy", pa.string(), "who wrote both: the model, and a checksum where it is a folder"),
        ("config_hash", pa.string(), "of the run's configuration and content"),
    ]


@Described
def trajectory_pair_schema(pa: Any) -> list[Column]:
    """One row a preference between two whole trajectories of a question: what an outcome reward can tell."""
    return [
        ("chosen_steps", _list(pair_step), "from the first step in which the two differ"),
        ("rejected_steps", _list(pair_step), "likewise"),
        ("pair_id", pa.string(), "unique within the data set"),
        ("question_id", pa.string(), "of the question; all its pairs are in one split"),
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("depth", pa.int32(), "steps that they share"),
        ("chosen_reward", pa.float64(), "F1 of the final answer"),
        ("rejected_reward", pa.float64(), "F1 of the final answer; lower"),
        ("margin", pa.float64(), "chosen_reward - rejected_reward"),
        ("chosen_node_id", pa.int32(), "node_id of the answer in the trees"),
        ("rejected_node_id", pa.int32(), "node_id of the answer in the trees"),
        ("policy", pa.string(), "who wrote both: the model, and a checksum where it is a folder"),
        ("config_hash", pa.string(), "of the run's configuration and content"),
    ]


@Described
def trajectory_schema(pa: Any) -> list[Column]:
    """One row an attempt at a question, with its scores and everything that was asked, written and found."""
    return [
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("question_id", pa.string(), "the question's id there"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "any of them is right"),
        ("kind", pa.string(), "type of question; empty where the data set names none"),
        ("hops", pa.int32(), "searches that the question needs; null where unknown"),
        ("answer", pa.string(), "null where the trajectory ended without one"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer"),
        ("em", pa.float64(), "exact match, 0 or 1"),
        ("f1", pa.float64(), "token F1, 0 to 1"),
        ("acc", pa.float64(), "1 where a golden answer is contained in the prediction"),
        ("retrievals", pa.int32(), "searches"),
        ("steps", pa.int32(), "actions"),
        ("forced", pa.int32(), "1 where the answer was forced at the step limit"),
        ("format_rate", pa.float64(), "1 where it is well-formed"),
        ("prompt_tokens", pa.int64(), "of all steps; null where the backend reports none"),
        ("completion_tokens", pa.int64(), "of all steps; null where the backend reports none"),
        ("well_formed", pa.bool_(), "by the format's own checker"),
        ("reason", pa.string(), "why it is not; empty where it is"),
        ("lasj", pa.bool_(), "a judge's verdict on the answer; null without one, as the next four"),
        ("steps_over", pa.int32(), "needless searches"),
        ("searches_known", pa.int32(), "searches of which it is known whether they were needless"),
        ("steps_under", pa.int32(), "false steps without a search"),
        ("own_steps_known", pa.int32(), "steps without a search of which it is known whether they were false"),
        ("trajectory", _list(step), "everything that was asked, written and found"),
    ]


@Described
def rollout_schema(pa: Any) -> list[Column]:
    """One trajectory of online training a row, with all that its reward is made of (`OUT/rollouts`)."""
    return [
        ("step", pa.int32(), "the optimizer step that it was made for, from 1"),
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("question_id", pa.string(), "the question's id there"),
        ("sample", pa.int32(), "within its group, from 0"),
        ("reward", pa.float64(), "null without a verdict; `cause` says why"),
        ("advantage", pa.float64(), "within its group, divided by the group's standard deviation"),
        ("cause", pa.string(), "why there is no reward"),
        ("parts", pa.map_(pa.string(), pa.float64()), "components of the reward by name"),
        ("well_formed", pa.bool_(), "by the format's own checker"),
        ("reason", pa.string(), "why it is not well-formed"),
        ("answer", pa.string(), "null where it ended without one"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "any of them is right"),
        ("turn", pa.string(), "the policy's words and what was put in between"),
        ("tokens", pa.int32(), "of the turn"),
        ("policy_tokens", pa.int32(), "of them, those that the policy wrote"),
        ("truncated", pa.bool_(), "cut off by a token limit"),
    ]


@Described
def plan_schema(pa: Any) -> list[Column]:
    """One row a question that has a reference plan (Search-P1, eq. 5)."""
    return [
        ("dataset", pa.string(), "name of the data set, or of the file"),
        ("question_id", pa.string(), "the question's id there"),
        ("planner", pa.string(), "the plan in words"),
        ("steps", pa.list_(pa.string()), "what has to be searched for, in order"),
        ("candidates", pa.int32(), "that could be read"),
        ("correct", pa.int32(), "of them, those whose answer is right"),
        ("votes", pa.int32(), "candidates that were voted on; 0 where there was nothing to vote on"),
    ]


def _list(row: Described) -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.struct(list(row())))


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
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    _check_schema(path, table.schema, schema)
    rows: list[Row] = table.to_pylist()
    return rows


def _check_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if not found.equals(expected):  # nested names too: the footer has no checksum
        raise DataError(f"{path.name} has columns {found.names}, not those of this version of reasonrag")


def _unreadable(path: Path, error: Exception) -> DataError:  # ValueError: a damaged name is no UTF-8
    return DataError(f"{path.name} cannot be read ({one_line(str(error))}); it is damaged or not Parquet")


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


def read_shards(folder: Path, stem: str, schema: pa.Schema, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of every shard, in order, a batch at a time: no more than that is held in memory.

    Args:
        folder: of the shards.
        stem: what their names begin with.
        schema: of all their columns.
        columns: to read; all of them where None.

    Raises:
        RunError: no shard, or not all of them.
        DataError: one is unreadable, damaged, or of another schema; its rows before the damage have been given.
    """
    paths = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if not paths or f"-of-{len(paths):05d}.parquet" not in paths[0].name:
        raise RunError(
            f"{folder.name}/{stem}-*.parquet: {len(paths)} shards found, not the full set; run build-tree again"
        )
    for path in paths:
        yield from _batched_rows(path, schema, columns)


def _batched_rows(path: Path, schema: pa.Schema, columns: Sequence[str] | None) -> Iterator[Row]:
    """As `read_parquet`, `_BATCH_ROWS` rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow, schema)
            left = file.metadata.num_rows
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                left -= batch.num_rows
                yield from batch.to_pylist()
            if left:  # a damaged footer may hide row groups
                raise ValueError(f"its footer and its rows differ by {abs(left)} rows")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
