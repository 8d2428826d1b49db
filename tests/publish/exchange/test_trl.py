from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reasonrag.dpo.preferences import Unusable, read_preferences
from reasonrag.publish.exchange.exporters import export_json_lines, sharegpt
from reasonrag.publish.exchange.importers import from_trl, import_trl
from reasonrag.storage.parquet import read_shards, write_parquet
from reasonrag.storage.tables import pair_schema
from tests.e2e import product
from tests.pipeline.test_build import run
from tests.publish.exchange.toys import says

PREFERENCE = Path(__file__).parents[3].parent / "shared/data/preference/llamafactory_dpo_en_demo.jsonl.gz"
needs_data = pytest.mark.skipif(not PREFERENCE.exists(), reason="../shared/data is not here")

ASKED, GOOD, BAD = says("user", "Who?"), says("assistant", "Spielberg"), says("assistant", "Lucas")
CONVERSATION = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}


def messages(pair):
    return {name: pair[name] for name in ("prompt", "chosen", "rejected")}


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
    pair = from_trl(raw)
    assert messages(pair) == CONVERSATION
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
    pair = from_trl({"chosen": chosen, "rejected": rejected})
    assert pair["prompt"] == [says("user", prompt)]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ends


def test_provenance_is_kept_and_an_id_becomes_a_text():
    given = {"question_id": 7, "dataset": "d", "depth": 2, "margin": 1, "chosen_end": "stop", "rejected_end": "turn"}
    pair = from_trl(CONVERSATION | given)
    assert {name: pair[name] for name in given} == given | {"question_id": "7", "margin": 1.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rejected": None}, "neither all texts nor all lists"),
        ({"prompt": "Who?"}, "neither all texts nor all lists"),
        ({"prompt": None}, "no beginning in common"),
        ({"prompt": []}, "prompt is empty"),
        ({"chosen": []}, "chosen is empty"),
        ({"rejected": [GOOD]}, "equal"),
        ({"prompt": [{"role": "user"}]}, "prompt holds something else than messages"),
        ({"chosen": [GOOD | {"tool_calls": [{"name": "f"}]}]}, "more than a role and a content"),
        ({"tools": "[{}]"}, "no place in a pair"),
        ({"margin": "0.3"}, "margin is no number"),
        ({"margin": float("nan")}, "margin is no number"),
        ({"depth": True}, "depth is no number"),
        ({"depth": -1}, "depth is not a count"),
        ({"chosen_visits": 2**31}, "chosen_visits is no number"),
        ({"dataset": 3}, "dataset is no text"),
        ({"chosen_end": "stop"}, "rejected_end is not one of stop, turn, length"),
        ({"chosen": [GOOD, GOOD], "chosen_end": "stop", "rejected_end": "turn"}, "chosen is not one message"),
    ],
)
def test_a_row_that_the_table_cannot_hold_says_why(changes, reason):
    with pytest.raises(Unusable, match=reason):
        from_trl(CONVERSATION | changes)


def test_a_turn_that_was_ended_with_nothing_in_it_is_a_step():
    ends = {"chosen_end": "stop", "rejected_end": "turn"}
    assert from_trl(CONVERSATION | ends | {"rejected": [says("assistant", "")]})["rejected"][0]["content"] == ""


def test_a_parquet_file_is_read_as_json_lines_are(tmp_path):
    rows = [from_trl(CONVERSATION | {"question_id": n}) for n in range(3)]
    write_parquet(tmp_path / "rows.parquet", rows, pair_schema())
    assert import_trl(tmp_path / "rows.parquet", tmp_path / "out") == {"train": 3, "set_aside": 0, "contradictory": 0}
    assert list(read_shards(tmp_path / "out", "train", pair_schema())) == rows
    assert [row.group for row in read_preferences(str(tmp_path / "out")).train] == [("", "0"), ("", "1"), ("", "2")]


def test_a_runs_pairs_come_back_from_json_lines_as_they_were(tmp_path):
    _, summary = run(tmp_path / "run", overrides={"pairs.test_share": 0.3})
    counted = {split: summary["pairs"][split] for split in ("train", "test")}
    assert export_json_lines(tmp_path / "run", tmp_path / "lines") == counted
    lines = {split: tmp_path / f"lines/{split}.jsonl" for split in counted}
    assert import_trl(lines["train"], tmp_path / "back", test=lines["test"]) == counted | {
        "set_aside": 0,
        "contradictory": 0,
    }
    for split in counted:
        there, back = (
            list(read_shards(folder, split, pair_schema())) for folder in (tmp_path / "run/pairs", tmp_path / "back")
        )
        assert there == back != []


@pytest.mark.data
@needs_data
def test_published_preferences_go_in_and_out_again(tmp_path):
    with gzip.open(PREFERENCE, "rt", encoding="utf-8") as lines:
        given = [json.loads(line) for line in lines]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    source = tmp_path / "rows.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for row in given:
            prompt = [says(roles[m["from"]], m["value"]) for m in row["conversations"]]
            sides = {side: [*prompt, says("assistant", row[side]["value"])] for side in ("chosen", "rejected")}
            file.write(json.dumps(sides) + "\n")
    assert import_trl(source, tmp_path / "out") == {"train": 119, "set_aside": 0, "contradictory": 0}
    for row, pair in zip(given, read_shards(tmp_path / "out", "train", pair_schema()), strict=True):
        made = sharegpt(pair)
        system = (
            [{"from": "system", "value": made.pop("system")}] if row["conversations"][0]["from"] == "system" else []
        )
        assert made.pop("system", "") == ""
        made["conversations"] = system + made["conversations"]
        assert {name: made[name] for name in row} == row


def test_pairs_that_contradict_each_other_are_named_and_kept(tmp_path):
    lines = [CONVERSATION, CONVERSATION | {"chosen": [BAD], "rejected": [GOOD]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    said = []
    counts = import_trl(tmp_path / "rows.jsonl", tmp_path / "out", log=said.append)
    assert counts == {"train": 2, "set_aside": 0, "contradictory": 2}
    (warning,) = said
    assert warning.startswith("warning: 2 of 2 pairs contradict each other, 2 of them word for word: ")
    assert warning.endswith("(first: rows.jsonl row 1 and rows.jsonl row 2); all are kept")
    assert len(read_preferences(str(tmp_path / "out")).train) == 2


def test_a_person_is_told_where_rows_were_set_aside_and_which_file_is_missing(tmp_path):
    rows = [{"prompt": "sk-" + "aB3" * 16, "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = product.run("import", tmp_path / "rows.jsonl", "--from", "trl", "--out", tmp_path / "out")
    assert done.stdout.splitlines()[-1] == f"set aside, with the reasons: {tmp_path / 'out/set_aside.jsonl'}"
    assert done.stderr.startswith("[warning")
    done = product.run("import", tmp_path / "nothing", "--from", "trl", "--out", tmp_path / "other")
    assert done.returncode == 2 and done.stderr.endswith("nothing: file not found; check its name and folder\n")
