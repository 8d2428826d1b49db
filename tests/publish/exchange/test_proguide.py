from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.dpo.preferences import Unusable, read_preferences
from reasonrag.publish.exchange.importers import from_proguide, import_proguide, to_proguide
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema
from tests.llm.tiny import save_tiny_model
from tests.publish.exchange.toys import proguide_row, says

ROOT = Path(__file__).parents[3]
ROWS = [
    proguide_row(0),
    proguide_row(
        1,
        chosen="So <evidence>Jaws\nis a film</evidence>",
        chosen_action_type="Evidence Extraction",
        chosen_content="Jaws\nis a film",
        rejected="hm",
        rejected_action_type="Other",
        rejected_content="",
    ),
    # The type goes by the first tag that opens, the content by the first of another order that closes.
    proguide_row(2, rejected="<query>a</query> <answer>b</answer>", rejected_action_type="Query Generation",
                 rejected_content="b"),
    proguide_row(3, rejected="<query>a", rejected_action_type="Query Generation", rejected_content=""),
]  # fmt: skip


def write_list(path, rows):
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return path


def pairs(folder, split="train"):
    return list(read_shards(folder, split, pair_schema()))


def test_a_row_becomes_a_pair_of_which_only_the_published_is_known():
    pair = from_proguide(proguide_row(6))
    assert pair["prompt"] == [says("system", "Reason."), says("user", "Question: Who made film 6?")]
    assert pair["chosen"] == [says("assistant", "So the next query is <query>film 6</query>")]
    known = {name for name, value in pair.items() if value is not None}
    assert known == {"prompt", "chosen", "rejected", "chosen_type", "rejected_type", "depth"}
    assert (pair["chosen_type"], pair["rejected_type"], pair["depth"]) == ("query", "answer", 2)
    assert list(pair) == pair_schema().names


def test_official_rows_come_back_exactly_through_the_files(tmp_path):
    counts = import_proguide(write_list(tmp_path / "RAG_ProGuide.json", ROWS), tmp_path / "out")
    assert counts == {"train": 4, "set_aside": 0, "contradictory": 0, "not_restored": 0}
    assert [json.dumps(to_proguide(pair)) for pair in pairs(tmp_path / "out")] == [json.dumps(row) for row in ROWS]
    assert not (tmp_path / "out/set_aside.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chosen": None}, "chosen missing or empty"),
        ({"rejected": " "}, "rejected missing or empty"),
        ({"instruction": 3}, "instruction missing or empty"),
        ({"input": "\ud800"}, "input holds half of a surrogate pair"),
        ({"rejected": proguide_row()["chosen"]}, "chosen and rejected are equal"),
        ({"chosen_action_type": "Other"}, "chosen_action_type is Other"),
        ({"rejected_action_type": "query"}, "rejected_action_type is none of"),
        ({"layer": True}, "layer is no count of steps"),
        ({"layer": -1}, "layer is no count of steps"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(changes, reason):
    with pytest.raises(Unusable, match=reason):
        from_proguide(proguide_row(**changes))


def test_unusable_rows_are_set_aside_whole_with_number_and_reason(tmp_path):
    bad = proguide_row(1, chosen="")
    source = write_list(tmp_path / "list.json", [ROWS[0], bad, "text", proguide_row(2, chosen_content="?")])
    counts = import_proguide(source, tmp_path / "out")
    assert counts == {"train": 2, "set_aside": 2, "contradictory": 0, "not_restored": 1}
    aside = [json.loads(line) for line in (tmp_path / "out/set_aside.jsonl").read_text().splitlines()]
    assert aside == [
        {"file": "list.json", "row": 2, "reason": "chosen missing or empty", "given": bad},
        {"file": "list.json", "row": 3, "reason": "not a JSON object with each key once", "given": "text"},
    ]
    assert json.loads((tmp_path / "out/pairs.json").read_text()) == {"train": 2, "set_aside": 2, "contradictory": 0}


def test_a_file_of_another_layout_is_refused_by_what_is_wrong_with_it(tmp_path):
    source = write_list(tmp_path / "list.json", [{"question": "Who?"}] * 7)
    with pytest.raises(DataError, match=r"instruction missing or empty in 7 rows \(1, 2, 3, 4, 5, \.\.\.\)"):
        import_proguide(source, tmp_path / "out")
    with pytest.raises(DataError, match="no rows in it"):
        import_proguide(write_list(tmp_path / "empty.json", []), tmp_path / "out")


def test_a_held_out_file_becomes_the_test_split_that_training_reads(tmp_path):
    source = write_list(tmp_path / "a.json", [proguide_row(n) for n in range(5)])
    test = write_list(tmp_path / "b.json", [proguide_row(n) for n in range(5, 7)])
    assert import_proguide(source, tmp_path / "out", test=test)["test"] == 2
    read = read_preferences(str(tmp_path / "out"))
    assert (len(read.train), len(read.test)) == (5, 2)
    assert {row.margin for row in read.train} == {None}
    assert [row.depth for row in read.train] == [0, 1, 2, 3, 0]
    import_proguide(source, tmp_path / "out")  # again without: the old test split is gone
    assert read_preferences(str(tmp_path / "out")).test == []


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path):
    source = write_list(tmp_path / "list.json", ROWS)
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-00000-of-00001.parquet").write_bytes(b"mine")
    with pytest.raises(RunError, match=r"holds other files and no pairs\.json"):
        import_proguide(source, out)
    assert (out / "train-00000-of-00001.parquet").read_bytes() == b"mine"
    with pytest.raises(RunError, match="the folder to be written"):
        import_proguide(source, tmp_path)


IMPORT = "import sys; from pathlib import Path; from reasonrag.publish.exchange.importers import import_proguide; "


def test_an_import_that_was_killed_is_made_again_with_equal_bytes(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    fifo = tmp_path / "slow.jsonl"
    os.mkfifo(fifo)
    out, clean = tmp_path / "out", tmp_path / "clean"
    script = f"{IMPORT} import_proguide(Path(sys.argv[1]), Path(sys.argv[2]))"
    child = subprocess.Popen([sys.executable, "-c", script, str(fifo), str(out)], cwd=ROOT)
    half = os.open(fifo, os.O_RDWR)  # opens at once, also where the child has died
    os.write(half, json.dumps(ROWS[0]).encode() + b"\n")
    while not (out / "pairs.json").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    os.close(half)
    # What a kill leaves while a shard is being written.
    for name in (".train-00000.parquet", ".train-00000.parquet.7.tmp", ".pairs.json.7.tmp", ".set_aside.jsonl.tmp"):
        (out / name).touch()
    import_proguide(source, out)
    import_proguide(source, clean)
    assert {p.name for p in out.iterdir()} == {".lock", "pairs.json", "train-00000-of-00001.parquet"}
    for name in ("pairs.json", "train-00000-of-00001.parquet"):
        assert (out / name).read_bytes() == (clean / name).read_bytes()


@pytest.mark.slow
def test_a_policy_is_trained_on_imported_pairs(tmp_path):
    from tests.training.toys import dpo_settings, train

    source = write_list(tmp_path / "RAG_ProGuide.json", [proguide_row(n) for n in range(8)])
    import_proguide(source, tmp_path / "pairs")
    settings = dpo_settings(tmp_path / "pairs", save_tiny_model(tmp_path / "tiny"), max_steps=3,
                            per_device_train_batch_size=4)  # fmt: skip
    summary = train(settings, tmp_path / "dpo", log=lambda line: None)
    losses = [entry["loss"] for entry in summary["history"] if "loss" in entry]
    assert summary["steps"] == len(losses) == 3
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < losses[0]
    assert summary["data"]["train"]["pairs"] == 8
