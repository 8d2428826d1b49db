from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.dpo.preferences import Unusable, known_columns, read_preferences, read_row
from reasonrag.publish.exporters import export_json_lines, sharegpt
from reasonrag.publish.importers import as_pair, import_pairs
from reasonrag.storage.parquet import read_shards, write_parquet
from reasonrag.storage.tables import pair_schema
from tests.e2e import product
from tests.pipeline.test_build import run
from tests.publish.toys import proguide_row, says

ROOT = Path(__file__).parents[2]
PREFERENCE = ROOT.parent / "shared/data/preference/llamafactory_dpo_en_demo.jsonl.gz"
needs_data = pytest.mark.skipif(not PREFERENCE.exists(), reason="../shared/data is not here")

ASKED, GOOD, BAD = says("user", "Who?"), says("assistant", "Spielberg"), says("assistant", "Lucas")
CONVERSATION = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
KEPT = {"set_aside": 0, "contradictory": 0}


def imported(raw):
    """A raw row as `import` writes it."""
    columns = known_columns(raw)
    return as_pair(read_row("row 1", columns), columns)


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


def test_provenance_is_kept_and_an_id_becomes_a_text():
    given = {"question_id": 7, "dataset": "d", "depth": 2, "margin": 1, "chosen_end": "stop", "rejected_end": "turn"}
    pair = imported(CONVERSATION | given)
    assert {name: pair[name] for name in given} == given | {"question_id": "7", "margin": 1.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": None}, "no common beginning"),
        ({"chosen": [GOOD | {"tool_calls": [{"name": "f"}]}]}, "more than a role and a content"),
        ({"tools": "[{}]"}, "no column in a pair"),
        ({"chosen_visits": True}, "chosen_visits is not a value of type int32"),
        ({"chosen_visits": 2**31}, "chosen_visits is not a value of type int32"),
        ({"confidence": float("nan")}, "confidence is not a value of type double"),
        ({"dataset": 3}, "dataset is not a value of type string"),
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
        {"file": "list.json", "row": 2, "reason": "chosen is empty", "given": bad},
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
    with pytest.raises(RunError, match=r"holds other files and no pairs\.json"):
        import_pairs(source, out)
    assert (out / "train-00000-of-00001.parquet").read_bytes() == b"mine"
    with pytest.raises(RunError, match="the folder to be written"):
        import_pairs(source, tmp_path)


IMPORT = "import sys; from pathlib import Path; from reasonrag.publish.importers import import_pairs; "


def test_an_import_that_was_killed_is_made_again_with_equal_bytes(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [proguide_row(n) for n in range(4)])
    fifo = tmp_path / "slow.jsonl"
    os.mkfifo(fifo)
    out, clean = tmp_path / "out", tmp_path / "clean"
    script = f"{IMPORT} import_pairs(Path(sys.argv[1]), Path(sys.argv[2]))"
    child = subprocess.Popen([sys.executable, "-c", script, str(fifo), str(out)], cwd=ROOT)
    half = os.open(fifo, os.O_RDWR)  # opens at once, also if the child has died
    os.write(half, json.dumps(proguide_row(0)).encode() + b"\n")
    while not (out / "pairs.json").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    os.close(half)
    # What a kill leaves while a shard is being written.
    for name in (".train-00000.parquet", ".train-00000.parquet.7.tmp", ".pairs.json.7.tmp", ".set_aside.jsonl.tmp"):
        (out / name).touch()
    import_pairs(source, out)
    import_pairs(source, clean)
    assert {p.name for p in out.iterdir()} == {".lock", "pairs.json", "train-00000-of-00001.parquet"}
    for name in ("pairs.json", "train-00000-of-00001.parquet"):
        assert (out / name).read_bytes() == (clean / name).read_bytes()


def test_a_parquet_file_is_read_as_json_lines_are(tmp_path):
    rows = [imported(CONVERSATION | {"question_id": n}) for n in range(3)]
    write_parquet(tmp_path / "rows.parquet", rows, pair_schema())
    assert import_pairs(tmp_path / "rows.parquet", tmp_path / "out") == {"train": 3} | KEPT
    assert pairs(tmp_path / "out") == rows
    assert [row.group for row in read_preferences(str(tmp_path / "out")).train] == [("", "0"), ("", "1"), ("", "2")]


def test_a_runs_pairs_come_back_from_json_lines_as_they_were(tmp_path):
    _, summary = run(tmp_path / "run", overrides={"pairs.test_share": 0.3})
    counted = {split: summary["pairs"][split] for split in ("train", "test")}
    assert export_json_lines(tmp_path / "run", tmp_path / "lines") == counted
    lines = {split: tmp_path / f"lines/{split}.jsonl" for split in counted}
    assert import_pairs(lines["train"], tmp_path / "back", test=lines["test"]) == counted | KEPT
    for split in counted:
        assert pairs(tmp_path / "run/pairs", split) == pairs(tmp_path / "back", split) != []


@pytest.mark.data
@needs_data
def test_published_preferences_go_in_and_out_again(tmp_path):
    with gzip.open(PREFERENCE, "rt", encoding="utf-8") as lines:
        given = [json.loads(line) for line in lines]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    rows = []
    for row in given:
        prompt = [says(roles[m["from"]], m["value"]) for m in row["conversations"]]
        rows.append({side: [*prompt, says("assistant", row[side]["value"])] for side in ("chosen", "rejected")})
    assert import_pairs(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out") == {"train": 119} | KEPT
    for row, pair in zip(given, pairs(tmp_path / "out"), strict=True):
        made = sharegpt(pair)
        system = (
            [{"from": "system", "value": made.pop("system")}] if row["conversations"][0]["from"] == "system" else []
        )
        assert made.pop("system", "") == ""
        made["conversations"] = system + made["conversations"]
        assert {name: made[name] for name in row} == row


def test_pairs_that_contradict_each_other_are_named_and_kept(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [CONVERSATION, CONVERSATION | {"chosen": [BAD], "rejected": [GOOD]}])
    lines = []
    counts = import_pairs(source, tmp_path / "out", log=lines.append)
    assert counts == {"train": 2, "set_aside": 0, "contradictory": 2}
    (warning,) = lines
    assert warning.startswith("warning: 2 of 2 pairs contradict each other, 2 of them word for word: ")
    assert warning.endswith("(first: rows.jsonl row 1 and rows.jsonl row 2); all are kept")
    assert len(read_preferences(str(tmp_path / "out")).train) == 2


def test_the_command_names_the_rows_set_aside_and_a_missing_file(tmp_path):
    rows = [{"prompt": "sk-" + "aB3" * 16, "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a"}]
    done = product.run("import", write_lines(tmp_path / "rows.jsonl", rows), "--out", tmp_path / "out")
    assert done.stdout.splitlines()[-1] == f"set aside, with the reasons: {tmp_path / 'out/set_aside.jsonl'}"
    assert done.stderr.startswith("[warning")
    done = product.run("import", tmp_path / "nothing", "--out", tmp_path / "other")
    assert done.returncode == 2 and done.stderr.endswith("nothing: file not found; check its name and folder\n")
