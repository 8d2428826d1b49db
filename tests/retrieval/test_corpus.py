"""Corpora by file, folder, address and name."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import DataError
from reasonrag.retrieval.passages import open_corpus, passage_contents

ROWS = [{"id": str(i), "contents": f"T{i}\nline\u2028one {i}"} for i in range(7)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def tar(name: str, data: bytes, *others: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        folder = tarfile.TarInfo("data00")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for path in (f"data00/._{name}", f"data00/{name}", *others):  # as macOS packs one
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def write_all_kinds(folder: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "d.json").write_text(json.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "e.parquet", row_group_size=3)
    (folder / "f.jsonl.gz").write_bytes(gzip.compress(tar("dump.jsonl", LINES)))
    return sorted(folder.iterdir())


def test_all_kinds_of_file_give_the_same_rows(tmp_path: Path) -> None:
    for path in write_all_kinds(tmp_path):
        corpus = open_corpus(str(path))
        assert corpus.name == path.name
        assert corpus.checksum() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert list(corpus.rows()) == list(enumerate(ROWS, 1)), path.name


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.csv", "a;.csv"])
def test_a_table_with_names_in_its_first_line_has_the_same_rows(tmp_path: Path, name: str) -> None:
    written = io.StringIO()
    table = csv.DictWriter(
        written, ["id", "contents"], delimiter="\t" if "tsv" in name else ";" if ";" in name else ","
    )
    table.writeheader()
    table.writerows(ROWS)
    text = b"\xef\xbb\xbf" + written.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    rows = list(open_corpus(str(tmp_path / name)).rows())
    assert [row for _, row in rows] == ROWS and rows[0][0] == 3  # each text has two lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "id,text\n1,one, two\n",
            "line 2 has 3 fields, and the first line 2 names; the first line has to name every column",
        ),
        ('id,text\n1,"one\n2,two\n', "not CSV or TSV in UTF-8: unexpected end of data"),
        ("id,text\n1,caf\xe9\n", "not CSV or TSV in UTF-8: 'utf-8' codec can't decode byte 0xe9"),
        ("id,text,text\n1,a,b\n", "its first line names a column twice"),
        ("PK\x03\x04", "its content is compressed"),
        ('id\ttext\n1\t"one\n2\ttwo\n3\tthree"\n', "the row that ends in line 4 has a text of several lines with tabs"),
    ],
)
def test_a_table_that_cannot_be_read_as_it_was_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=re.escape(said)):
        list(open_corpus(str(tmp_path / "a.csv")).rows())


def test_a_corpus_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    corpus = open_corpus(str(tmp_path / "a.jsonl"))
    corpus.checksum()
    rows = corpus.rows()
    next(rows)
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(LINES)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        list(rows)


def test_a_folder_that_lacks_a_shard_says_so(tmp_path: Path) -> None:
    for number in (0, 2):
        (tmp_path / f"train-{number:05d}-of-00003.jsonl").write_bytes(LINES)
    with capture_logs() as logs:
        open_corpus(str(tmp_path))
    assert "2 of 3 files of train-*.jsonl are there; the others are missing in this corpus" in logs[-1]["event"]


def test_a_tar_archive_of_several_files_is_never_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(tar("one.jsonl", LINES, "two.jsonl")))
    with pytest.raises(DataError, match="a tar archive of several files, of which one would be read; unpack it"):
        list(open_corpus(str(tmp_path / "two.jsonl.gz")).rows())


def test_a_folder_of_files_is_one_corpus_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_all_kinds(tmp_path)
    (tmp_path / "README.md").write_text("not a passage")
    (tmp_path / ".hidden.jsonl").write_text("{}")
    (tmp_path / "~$locked.jsonl").write_text("{}")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.rows()) == list(enumerate(ROWS * 5, 1))
    before = corpus.checksum()
    (tmp_path / "a.jsonl").rename(tmp_path / "z.jsonl")
    assert open_corpus(str(tmp_path)).checksum() != before


def test_a_folder_of_texts_has_a_document_for_each(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "Jaws.txt").write_bytes(b"\xef\xbb\xbfA film.\nOf 1975.")
    (tmp_path / "sub/Ed Wood.md").write_bytes("A café, a director.".encode("latin-1"))
    (tmp_path / "picture.png").write_bytes(b"")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.rows()) == [
        (1, {"id": "Jaws.txt", "title": "Jaws", "text": "A film.\nOf 1975."}),
        (2, {"id": "sub/Ed Wood.md", "title": "Ed Wood", "text": "A café, a director."}),
    ]
    assert corpus.total == 2
    before = corpus.checksum()
    (tmp_path / "Jaws.txt").write_text("A film.\nOf 1975.", encoding="utf-16")  # as Notepad may save it
    assert next(iter(open_corpus(str(tmp_path)).rows()))[1]["text"] == "A film.\nOf 1975."
    (tmp_path / "Jaws.txt").rename(tmp_path / "Jaws 2.txt")
    assert open_corpus(str(tmp_path)).checksum() != before


def test_lines_that_are_not_json_keep_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n\n{"id": \n[2]\n')
    assert list(open_corpus(str(tmp_path / "a.jsonl")).rows()) == [(1, {"id": 1}), (3, None), (4, [2])]


@pytest.mark.parametrize("kind", ["b.jsonl.gz", "e.parquet", "f.jsonl.gz"])
def test_a_file_that_was_cut_off_or_damaged_is_refused(tmp_path: Path, kind: str) -> None:
    write_all_kinds(tmp_path)
    data = (tmp_path / kind).read_bytes()
    flipped = data[: len(data) // 2] + b"\x00\xff\x00\xff" + data[len(data) // 2 + 4 :]
    # Parquet files have no checksums.
    for damaged in (data[:-20], b"plain", *([flipped] if "parquet" not in kind else [])):
        (tmp_path / kind).write_bytes(damaged)
        with pytest.raises(DataError, match=r"is the file complete\?|is damaged or not Parquet") as caught:
            list(open_corpus(str(tmp_path / kind)).rows())
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gone.jsonl", "file not found"),
        ("wiki-18", "did you mean 'wiki18'"),
        ("nowhere", "neither a file nor a folder nor a known name"),
        ("hub:a/b@main:", "write hub:OWNER/NAME"),
        ("hub:a/b:train", "write hub:OWNER/NAME"),
    ],
)
def test_what_is_no_corpus_is_refused_in_one_line(spec: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        open_corpus(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["hub:a/b@v1:x.parquet", "hub:a/b:data/x.jsonl.gz", "wiki18", "hotpotqa:dev"])
def test_without_the_hub_one_line_says_so(spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"fetched from the Hub.*which cannot be used") as caught:
        open_corpus(spec)
    assert "\n" not in str(caught.value)


def test_a_file_in_the_hubs_cache_is_read_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    commit = "0123456789012345678901234567890123456789"
    cached = tmp_path / f"datasets--o--n/snapshots/{commit}/data"
    cached.mkdir(parents=True)
    (cached / "c.jsonl").write_bytes(LINES)
    (tmp_path / "datasets--o--n/refs").mkdir()
    (tmp_path / "datasets--o--n/refs/main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    corpus = open_corpus("hub:o/n:data/c.jsonl")
    assert corpus.name == f"hub:o/n@{commit}:data/c.jsonl"
    assert commit in corpus.checksum()
    assert list(corpus.rows()) == list(enumerate(ROWS, 1))


def test_contents_are_title_and_text_where_there_are_none() -> None:
    assert passage_contents({"contents": "T\nx"}) == "T\nx"
    assert passage_contents({"title": "T\n1", "text": "x"}) == "T 1\nx"
    assert passage_contents({"title": None, "text": "x\ud83d"}) == "x?"
    assert passage_contents({"title": 1917, "text": "x"}) == "1917\nx"
    assert passage_contents({"title": "T"}) is passage_contents({"contents": " "}) is None
