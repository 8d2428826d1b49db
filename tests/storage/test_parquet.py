from __future__ import annotations

import gzip
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.dpo.preferences import read_preferences
from reasonrag.storage.inputs import raw_rows
from reasonrag.storage.parquet import (
    ShardWriter,
    pack,
    read_batches,
    read_parquet,
    read_shards,
    shard_paths,
    write_parquet,
)
from reasonrag.storage.tables import pair_schema, tree_schema

ROW = {"question_id": "1", "dataset": "d", "margin": 0.5, "prompt": [{"role": "user", "content": "x" * 50}]}


def pair_rows(count: int):
    generator = random.Random(0)
    return [ROW | {"pair_id": str(i), "margin": generator.random()} for i in range(count)]


@pytest.mark.fault("30", "shards with a column of nulls, of whole numbers, of both", "one schema in all of them")
def test_a_column_of_nulls_or_whole_numbers_keeps_its_type(tmp_path, figure):
    kinds = {"null": {}, "whole": {"chosen_reward": 1, "depth": 2}, "both": {"chosen_reward": 0.5}}
    for name, values in kinds.items():
        write_parquet(tmp_path / f"{name}.parquet", [ROW | values], pair_schema())
    schemas = [pq.read_schema(tmp_path / f"{name}.parquet") for name in kinds]
    different = {str(schema) for schema in schemas}
    figure(f"{len(kinds)} shards, schemas among them: {len(different)}")
    assert len(different) == 1 and schemas[0].field("chosen_reward").type == "double"


def test_what_is_no_number_is_not_packed():
    with pytest.raises(ValueError, match="margin holds NaN"):
        pack([ROW | {"margin": float("nan")}], pair_schema())


def test_a_shard_holds_row_groups_of_bounded_size(tmp_path):
    rows = [ROW | {"pair_id": str(i), "policy": "p" * (1 << 20)} for i in range(40)]
    writer = ShardWriter(tmp_path, "train", pair_schema(), shard_rows=100)
    for row in rows[:10]:
        writer.add(row)
    for row in rows[10:]:
        writer.add_batch(pa.RecordBatch.from_pylist([row], schema=pair_schema()))
    (path,) = writer.close()
    assert pq.read_metadata(path).num_row_groups == 3
    assert [row["pair_id"] for row in read_parquet(path, pair_schema())] == [row["pair_id"] for row in rows]


def test_shards_are_numbered_and_read_in_order(tmp_path):
    writer = ShardWriter(tmp_path, "train", pair_schema(), shard_rows=2)
    for row in pair_rows(5):
        writer.add(row)
    names = [path.name for path in writer.close()]
    assert names == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert [r["pair_id"] for r in read_shards(tmp_path, "train", pair_schema())] == list("01234")


def test_no_rows_are_no_shard_and_drop_those_of_before(tmp_path):
    write_parquet(tmp_path / "test-00000-of-00001.parquet", pair_rows(1), pair_schema())
    assert ShardWriter(tmp_path, "test", pair_schema(), shard_rows=2).close() == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match="0 shards"):
        list(read_shards(tmp_path, "test", pair_schema()))


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    (tmp_path / ".train-00000.parquet").write_bytes(b"half")
    (tmp_path / ".train-00001.parquet.123.tmp").write_bytes(b"a quarter")
    ShardWriter(tmp_path, "train", pair_schema(), shard_rows=2).close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_shard_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, "train", pair_schema(), shard_rows=1)
    for row in pair_rows(3):
        writer.add(row)
    writer.close()[1].unlink()
    with pytest.raises(RunError, match="not the full set"):
        list(read_shards(tmp_path, "train", pair_schema()))


def test_a_copy_of_a_shard_is_named_and_never_deleted(tmp_path):
    copy = tmp_path / "train-00000-of-00001 (conflicted copy 2026-01-02).parquet"
    write_parquet(copy, pair_rows(1), pair_schema())
    writer = ShardWriter(tmp_path, "train", pair_schema(), shard_rows=1)
    writer.add(pair_rows(1)[0])
    assert copy.exists() and len(writer.close()) == 1
    for read in (lambda: shard_paths(tmp_path, "train"), lambda: read_preferences(str(tmp_path))):
        with pytest.raises((RunError, DataError), match=r"conflicted copy.* is a copy of a file beside it.*move it"):
            read()
    assert copy.exists()


def test_another_schema_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", pair_rows(1), pair_schema())
    with pytest.raises(DataError, match="columns"):
        read_parquet(tmp_path / "a.parquet", tree_schema())


def test_of_a_question_only_the_row_groups_that_hold_it_are_read(tmp_path):
    rows = {"question_id": [f"q{n // 3}" for n in range(12)], "text": [f"text {n}" for n in range(12)]}
    path = tmp_path / "nodes.parquet"
    pq.write_table(pa.table(rows), path, row_group_size=4, write_page_checksum=True, compression="none")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text 1", b"test 1", 1))  # in the first of three row groups

    def texts(question_id):
        batches = read_batches(path, None, columns=["text", "question_id"], question_id=question_id)
        return [row["text"] for batch in batches for row in batch.to_pylist()]

    assert texts("q3") == ["text 9", "text 10", "text 11"] and texts("q2") == ["text 6", "text 7", "text 8"]
    assert texts("q9") == []
    for damaged in ("q1", None):
        with pytest.raises(DataError, match="damaged"):
            texts(damaged)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            pa.table({"question": pa.array([2**60], pa.timestamp("us"))}),
            "question.parquet cannot be read .*out of range",
        ),
        (
            pa.table({"question": pa.array([1], pa.timestamp("us", tz="Mars/Olympus"))}),
            "question.parquet cannot be read",
        ),
        (
            pa.table([["Who?"], ["Where?"]], names=["question", "question"]),
            "two of its columns have the same name; rename one",
        ),
    ],
)
def test_values_that_nobody_can_read_are_damage(table, told, tmp_path):
    pq.write_table(table, tmp_path / "question.parquet")
    with pytest.raises(DataError, match=told):
        list(raw_rows(tmp_path / "question.parquet"))
    with pytest.raises(DataError, match="file not found"):
        list(raw_rows(tmp_path / "other.parquet"))


LINES = '{"id": "1"}\n{"id": "2"}\n'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LINES.encode("utf-16"), "UTF-16 or UTF-32; save it in UTF-8"),
        (LINES.encode("utf-16-be"), "UTF-16 or UTF-32; save it in UTF-8"),
        (gzip.compress(LINES.encode()), "compressed; unpack it, or name gzip .jsonl.gz"),
    ],
    ids=["UTF-16", "UTF-16 BE", "gzip"],
)
def test_a_file_in_another_encoding_is_never_read_in_part(data, said, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=said):
        list(raw_rows(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    assert list(raw_rows(tmp_path / "rows.jsonl")) == [(1, {"id": "1"}), (2, {"id": "2"})]


def test_a_small_file_of_endless_texts_is_refused_before_it_fills_the_memory(tmp_path):
    rows = pa.table({"text": ["A" * 1_000_000] * 400})
    pq.write_table(rows, tmp_path / "bomb.parquet", compression="zstd")
    with pytest.raises(DataError, match="it unpacks to more than 1000 times its size, which no rows do"):
        list(read_batches(tmp_path / "bomb.parquet", None))
