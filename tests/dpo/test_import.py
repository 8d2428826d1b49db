from __future__ import annotations

import json
from pathlib import Path

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.dpo.preferences import Unusable, as_pair, import_pairs, read_preferences, read_row
from reasonrag.publish.exporters import export_pairs
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema
from tests.pipeline.test_build import run
from tests.publish.toys import proguide_row, says

ROOT = Path(__file__).parents[2]
ASKED, GOOD, BAD = says("user", "Who?"), says("assistant", "Spielberg"), says("assistant", "Lucas")
CONVERSATION = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
KEPT = {"set_aside": 0, "contradictory": 0}


def imported(raw):
    """A raw row as `import` writes it."""
    return as_pair(read_row("row 1", raw), raw)


def pairs(folder, split="train"):
    return list(read_shards(folder, split, pair_schema()))


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "raw",
    [
        CONVERSATION,
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "Who?", "chosen": "Spielberg", "rejected": "Lucas"},
        {"prompt": [ASKED | {"name": None}], "chosen": [GOOD], "rejected": [BAD], "tools": None, "score": 3.5},
    ],
    ids=["explicit", "implicit", "texts", "foreign columns"],
)
def test_every_layout_gives_the_same_pair(raw):
    pair = imported(raw)
    assert {name: pair[name] for name in CONVERSATION} == CONVERSATION
    assert all(value is None for name, value in pair.items() if name not in CONVERSATION)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "ends"),
    [
        ("Who?\nSpielberg", "Who?\nSpiel", "Who?\n", ("Spielberg", "Spiel")),
        ("Who? Yes, he", "Who? Yes", "Who? ", ("Yes, he", "Yes")),
        ("a b  c", "a b  d", "a b  ", ("c", "d")),
    ],
)
def test_an_implicit_prompt_of_text_ends_where_a_word_ends(chosen, rejected, prompt, ends):
    pair = imported({"chosen": chosen, "rejected": rejected})
    assert pair["prompt"] == [says("user", prompt)]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ends


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": None}, "no common beginning"),
        ({"chosen": [GOOD | {"tool_calls": [{"name": "f"}]}]}, "more than a role and a content"),
        ({"tools": "[{}]"}, "tools and chat_template_kwargs are not supported"),
        ({"chosen_visits": 2**31}, "too large to fit"),
        ({"confidence": float("nan")}, "confidence holds NaN"),
        ({"dataset": 3}, "Expected bytes, got a 'int' object"),
    ],
)
def test_a_row_that_the_table_cannot_hold_gives_the_reason(changes, reason):
    with pytest.raises(Unusable, match=reason):
        imported(CONVERSATION | changes)


def test_a_row_of_proguide_becomes_a_pair_of_its_published_fields():
    pair = imported(proguide_row(6))
    assert pair["prompt"] == [says("system", "Reason."), says("user", "Question: Who made film 6?")]
    assert pair["chosen"] == [says("assistant", "So the next query is <query>film 6</query>")]
    known = {name for name, value in pair.items() if value is not None}
    assert known == {"prompt", "chosen", "rejected", "chosen_type", "rejected_type", "depth"}
    assert (pair["chosen_type"], pair["rejected_type"], pair["depth"]) == ("query", "answer", 2)
    assert list(pair) == pair_schema().names
    not_as_written = imported(proguide_row(6, prompt="another text"))
    assert not_as_written["prompt"] == [says("user", "another text")]


def test_unusable_rows_are_set_aside_whole_with_number_and_reason(tmp_path):
    bad = proguide_row(1, chosen="")
    source = tmp_path / "list.json"
    source.write_text(json.dumps([proguide_row(0), bad, "text", proguide_row(2)]), encoding="utf-8")
    counts = import_pairs(source, tmp_path / "out")
    assert counts == {"train": 2, "set_aside": 2, "contradictory": 0}
    aside = [json.loads(line) for line in (tmp_path / "out/set_aside.jsonl").read_text().splitlines()]
    assert aside == [
        {"file": "list.json", "row": 2, "reason": "chosen: a message needs a role and a content of text", "given": bad},
        {"file": "list.json", "row": 3, "reason": "not a JSON object with each key once", "given": "text"},
    ]
    assert json.loads((tmp_path / "out/pairs.json").read_text()) == counts


def test_a_file_of_another_layout_is_refused_by_its_problems(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [{"question": "Who?"}] * 7)
    with pytest.raises(DataError, match=r"chosen missing in 7 rows \(1, 2, 3, 4, 5, \.\.\.\)"):
        import_pairs(source, tmp_path / "out")
    with pytest.raises(DataError, match="no rows in it"):
        import_pairs(write_lines(tmp_path / "empty.jsonl", []), tmp_path / "out")


def test_a_held_out_file_becomes_the_test_split_that_training_reads(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [proguide_row(n) for n in range(5)])
    test = write_lines(tmp_path / "b.jsonl", [proguide_row(n) for n in range(5, 7)])
    assert import_pairs(source, tmp_path / "out", test=test)["test"] == 2
    read = read_preferences(str(tmp_path / "out"))
    assert (len(read.train), len(read.test)) == (5, 2)
    assert {row.margin for row in read.train} == {None}
    assert [row.depth for row in read.train] == [0, 1, 2, 3, 0]
    assert read.train == [
        # Only the name of the row differs: `dpo train` reads the file as the import does.
        type(row)(read.train[n].place, row.sides, row.margin, row.depth, row.group, row.types)
        for n, row in enumerate(read_preferences(str(source)).train)
    ]
    import_pairs(source, tmp_path / "out")  # again without: the old test split is gone
    assert read_preferences(str(tmp_path / "out")).test == []


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [CONVERSATION])
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-00000-of-00001.parquet").write_bytes(b"mine")
    with pytest.raises(RunError, match="holds other files and no import of pairs"):
        import_pairs(source, out)
    assert (out / "train-00000-of-00001.parquet").read_bytes() == b"mine"
    with pytest.raises(RunError, match="the folder to be written"):
        import_pairs(source, tmp_path)


def test_a_runs_pairs_come_back_from_json_lines_as_they_were(tmp_path):
    _, summary = run(tmp_path / "run", overrides={"pairs.test_share": 0.3})
    counted = {split: summary["pairs"][split] for split in ("train", "test")}
    assert export_pairs(tmp_path / "run", tmp_path / "lines") == counted
    lines = {split: tmp_path / f"lines/{split}.jsonl" for split in counted}
    assert import_pairs(lines["train"], tmp_path / "back", test=lines["test"]) == counted | KEPT
    for split in counted:
        assert pairs(tmp_path / "run/pairs", split) == pairs(tmp_path / "back", split) != []


def test_pairs_that_contradict_each_other_are_named_and_kept(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [CONVERSATION, CONVERSATION | {"chosen": [BAD], "rejected": [GOOD]}])
    lines = []
    counts = import_pairs(source, tmp_path / "out", log=lines.append)
    assert counts == {"train": 2, "set_aside": 0, "contradictory": 2}
    (warning,) = lines
    assert warning.startswith("warning: 2 of 2 pairs contradict each other, 2 of them word for word: ")
    assert warning.endswith("(first: rows.jsonl row 1 and rows.jsonl row 2); all are kept")
    assert len(read_preferences(str(tmp_path / "out")).train) == 2


def test_secrets_of_foreign_rows_are_replaced(tmp_path):
    secret = "sk-" + "aB3" * 16
    source = write_lines(tmp_path / "rows.jsonl", [{"prompt": secret, "chosen": "a", "rejected": "b"}])
    import_pairs(source, tmp_path / "out")
    assert secret not in str(pairs(tmp_path / "out"))
