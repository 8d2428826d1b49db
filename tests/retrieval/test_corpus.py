"""Reading corpus files."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from reasonrag.errors import DataError
from reasonrag.retrieval.corpus import corpus_checksum, read_corpus
from reasonrag.types import Passage

DATA = Path(__file__).parents[2].parent / "shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA.name} is not beside the repository")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


def test_all_kinds_of_file_and_columns_give_the_same_passages(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "a.jsonl", {"id": 1, "contents": "T\nx\u2028y"}, {"id": "2", "contents": "U\nz"})
    write(tmp_path / "b.jsonl", {"id": "1", "title": "T", "text": "x\u2028y"}, {"id": "2", "title": "U", "text": "z"})
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    pq.write_table(pa.table({"id": [1, 2], "contents": ["T\nx\u2028y", "U\nz"]}), tmp_path / "d.parquet")
    for path in tmp_path.iterdir():
        assert list(read_corpus(path)) == [Passage("1", "T\nx\u2028y"), Passage("2", "U\nz")], path.name


def test_unusable_rows_are_named_in_one_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"id": "1", "contents": "x"},
        {"id": "2", "contents": " "},
        {"id": "", "contents": "x"},
        {"id": "1", "contents": "y"},
        {"id": "5", "title": "only"},
        [],
    )
    with pytest.raises(DataError) as caught:
        list(read_corpus(path))
    message = str(caught.value)
    assert "contents missing or empty in 2 rows (2, 5)" in message
    assert "id missing or empty in 1 row (3)" in message
    assert "duplicate id in 1 row (4 '1')" in message
    assert "not a JSON object in 1 row (6)" in message
    assert "\n" not in message


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="file not found"):
        list(read_corpus(tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        corpus_checksum(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="no passages"):
        list(read_corpus(write(tmp_path / "empty.jsonl")))


def test_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "1", "contents": "x"})
    assert corpus_checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.data
@needs_data
@pytest.mark.parametrize(("name", "count"), [("hotpotqa", 3316), ("2wikimultihopqa_pool", 5543), ("retrievalqa", 1948)])
def test_real_corpora_load_whole(name: str, count: int) -> None:
    assert sum(1 for _ in read_corpus(DATA / f"corpus/{name}.jsonl.gz")) == count
