"""What is found before anything is published, where, and what of it is shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from reasonrag.publish.hub import files_of
from reasonrag.publish.scan import EMAIL, PATH, SECRET, places_of, scan
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import tree_schema
from tests.report.hostile import rows

TOKEN = "hf_" + "abcdEFGH1234" * 3
ROOT_HOME = "/" + "root"  # in two, as this is no path of anybody's machine


def found_in(folder: Path, *places: str):
    return {(f.file, f.column, f.row, f.kind, f.what, f.count) for f in scan(folder, files_of(folder), places)}


def write_tree(folder: Path, **changed: object) -> None:
    nodes = rows(3, text="quiet")
    nodes[1] |= changed
    write_parquet(folder / "t.parquet", nodes, tree_schema())


@pytest.mark.parametrize(
    ("column", "put"),
    [
        ("text", lambda text: text),
        ("golden_answers[]", lambda text: ["b", text, None]),
        ("prompt[].content", lambda text: [{"role": "user", "content": "x"}, {"role": "user", "content": text}]),
        ("passages[].contents", lambda text: [{"id": "1", "contents": text, "score": None}]),
    ],
)
@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        (f"see {TOKEN}.", SECRET, "hugging_face"),
        ("write to ann.lee+x@mail.example.org, please", EMAIL, "ann.lee+x@mail.example.org"),
        ("in '/home/ann/run'", PATH, "/home/ann"),
        ("file:///Users/ann/x", PATH, "/Users/ann"),
        (r"a\n/home/ann", PATH, "/home/ann"),
        ("--out=/home/ann", PATH, "/home/ann"),
        (f"hf:{ROOT_HOME}/models", PATH, f"{ROOT_HOME}/m"),
        (r"C:\Users\Ann\x", PATH, r"C:\Users\Ann"),
        ("ran on gpu-7.lan today", PATH, "gpu-7.lan"),
        ("under /data/secret/here", PATH, "/data/secret"),
    ],
)
def test_everything_is_found_in_every_kind_of_column(tmp_path, column, put, text, kind, what):
    write_tree(tmp_path, **{column.partition("[")[0]: put(text)})
    assert found_in(tmp_path, "gpu-7.lan", "/data/secret") == {("t.parquet", column, 2, kind, what, 1)}


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example/home/page",
        "at home/ann",
        "/home alone",
        "a @ b.example",
        "hf:policy@99ac93769c76",
        "x@y",
        "~/x",
    ],
)
def test_what_is_none_is_not_found(tmp_path, text):
    write_tree(tmp_path, text=text)
    assert found_in(tmp_path, "gpu-7.lan") == set()


def test_a_secret_is_never_shown_and_nothing_that_overlaps_it(tmp_path):
    write_tree(tmp_path, text="https://me:hunter2hunter2@db.example.org/ and /home/ann/x\x1b[31m")
    findings = scan(tmp_path, files_of(tmp_path), ())
    assert {f.kind for f in findings} == {SECRET, PATH}
    shown = "\n".join(map(str, findings))
    assert "hunter2" not in shown and "\x1b" not in shown and "/home/ann" in shown


def test_a_finding_names_its_first_row_and_counts_the_others(tmp_path):
    nodes = rows(2_500, text="quiet")
    for place in (1_200, 1_201, 2_400):
        nodes[place]["text"] = "ann@example.org"
    write_parquet(tmp_path / "t.parquet", nodes, tree_schema())
    (finding,) = scan(tmp_path, files_of(tmp_path), ())
    assert str(finding) == "t.parquet, column text, row 1,201 and 2 more: email ann@example.org"


def test_text_files_are_searched_by_line_and_keys_that_fill_many_lines_are_found(tmp_path):
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n" * 3 + "-----END PRIVATE KEY-----"
    (tmp_path / "card.md").write_text(f"one\ntwo /home/ann/x\n{key}\n", encoding="utf-8")
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff ann@example.org"}')
    (tmp_path / "model.safetensors").write_bytes(b"ann@example.org")
    assert found_in(tmp_path) == {
        ("card.md", "", 2, PATH, "/home/ann", 1),
        ("card.md", "", 3, SECRET, "private_key", 1),
        ("x.json", "", 1, EMAIL, "ann@example.org", 1),
    }


def test_the_metadata_of_a_table_is_searched(tmp_path):
    table = pa.table({"text": ["quiet"]}).replace_schema_metadata({"options": '{"path": "/home/ann/x"}'})
    field = pa.field("text", pa.string(), metadata={"by": "ann@example.org"})
    pq.write_table(table.cast(pa.schema([field], metadata=table.schema.metadata)), tmp_path / "t.parquet")
    kinds = {(EMAIL, "ann@example.org"), (PATH, "/home/ann")}
    assert found_in(tmp_path) == {("t.parquet", "metadata", 0, kind, what, 1) for kind, what in kinds}


def test_the_header_of_weights_is_searched_and_the_weights_are_not(tmp_path):
    save_file({"ann@example.org": np.frombuffer(b" /home/ann/x ann@example.org", np.uint8)}, tmp_path / "a.safetensors")
    assert found_in(tmp_path) == {("a.safetensors", "", 1, EMAIL, "ann@example.org", 1)}


def test_this_machine_is_known_by_its_folders(tmp_path):
    assert str(tmp_path.resolve()) in places_of(tmp_path)
    assert str(Path.home()) in places_of() or str(Path.home()).count("/") < 2
