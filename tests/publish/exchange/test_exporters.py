from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import in_test_split
from reasonrag.dpo.preferences import Unusable
from reasonrag.formats import FORMATS
from reasonrag.publish.exchange import EXPORTERS
from reasonrag.publish.exchange.exporters import (
    description,
    export_json_lines,
    export_llamafactory,
    export_questions,
    export_verl,
    sharegpt,
    verl_schema,
)
from reasonrag.storage.parquet import read_parquet, read_shards
from reasonrag.storage.tables import pair_schema
from tests.pipeline.test_build import QUESTIONS, run
from tests.publish.exchange.test_trl import PREFERENCE, needs_data
from tests.publish.exchange.toys import says

# data/README.md of hiyouga/LLaMA-Factory.
INFO_KEYS = {"hf_hub_url", "ms_hub_url", "script_url", "cloud_file_name", "file_name", "formatting", "ranking",
             "subset", "split", "folder", "num_samples", "columns", "tags"}  # fmt: skip
COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios",
           "chosen", "rejected", "kto_tag"}  # fmt: skip
TAGS = {"role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(out, overrides={"pairs.test_share": 0.3})
    return out


def pairs(folder, split):
    return list(read_shards(folder / "pairs", split, pair_schema()))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def aligned(info, row):
    """System, prompt, chosen and rejected of a row as the documentation has them read; what it forbids fails here."""
    assert info.keys() <= INFO_KEYS and info["formatting"] == "sharegpt" and info["ranking"] is True
    columns, tags = info["columns"], info["tags"]
    assert columns.keys() <= COLUMNS and tags.keys() <= TAGS
    keys = {tags["role_tag"], tags["content_tag"]}
    turns = list(row[columns["messages"]])
    system = row.get(columns.get("system"), "")
    if turns[0][tags["role_tag"]] == tags["system_tag"]:
        system = turns.pop(0)[tags["content_tag"]]
    sides = [row[columns[side]] for side in ("chosen", "rejected")]
    for message in (*turns, *sides):
        assert message.keys() == keys and all(isinstance(value, str) for value in message.values())
    assert len(turns) % 2 == 1
    assert {turn[tags["role_tag"]] for turn in turns[::2]} == {tags["user_tag"]}
    assert {turn[tags["role_tag"]] for turn in (*turns[1::2], *sides)} == {tags["assistant_tag"]}
    return system, *([turn[tags["content_tag"]] for turn in part] for part in (turns, sides))


def test_llamafactory_reads_every_pair_as_it_was_asked_and_answered(finished, tmp_path):
    counts = export_llamafactory(finished, tmp_path / "out")
    described = json.loads((tmp_path / "out/dataset_info.json").read_text())
    assert described.keys() == {"reasonrag_train", "reasonrag_test"}
    for split in ("train", "test"):
        info = described[f"reasonrag_{split}"]
        rows, given = lines(tmp_path / "out" / info["file_name"]), pairs(finished, split)
        assert len(rows) == len(given) == counts[split] > 0
        for row, pair in zip(rows, given, strict=True):
            assert row.keys() == set(info["columns"].values())
            system, asked, sides = aligned(info, row)
            assert [says("system", system), says("user", asked[0])] == pair["prompt"]
            assert sides == [pair[side][0]["content"] for side in ("chosen", "rejected")]


@pytest.mark.data
@needs_data
def test_rows_that_llamafactory_publishes_have_the_same_layout():
    with gzip.open(PREFERENCE, "rt", encoding="utf-8") as rows:
        given = [json.loads(row) for row in rows]
    info = description("rows.jsonl")
    for row in given:
        _, asked, _ = aligned(info, row)
        assert len(asked) in (1, 3, 5, 7)


def test_a_conversation_keeps_its_turns_and_may_have_no_system_message():
    asked = [says("user", "a"), says("assistant", "b"), says("user", "c")]
    row = sharegpt({"prompt": asked, "chosen": [says("assistant", "d")], "rejected": [says("assistant", "")]})
    assert aligned(description("f"), row) == ("", ["a", "b", "c"], ["d", ""])


@pytest.mark.parametrize(
    "roles", [[], ["system"], ["assistant"], ["user", "user"], ["user", "assistant"], ["user", "system", "user"]]
)
def test_turns_that_llamafactory_would_pass_over_are_refused(roles):
    with pytest.raises(Unusable, match="turns do not go"):
        sharegpt({"prompt": [says(role, "x") for role in roles], "chosen": [], "rejected": []})


def test_json_lines_hold_the_tables_rows(finished, tmp_path):
    counts = export_json_lines(finished, tmp_path / "out")
    for split in ("train", "test"):
        assert lines(tmp_path / f"out/{split}.jsonl") == pairs(finished, split)
    assert json.loads((tmp_path / "out/jsonl-export.json").read_text()) == counts


def test_verl_rows_have_the_documented_fields_and_types(finished, tmp_path):
    counts = export_verl(finished, tmp_path / "out")
    assert sum(counts.values()) == len(QUESTIONS) and counts["test"] > 0
    asked = {split: read_parquet(tmp_path / f"out/{split}.parquet", verl_schema()) for split in counts}
    indexes = [row["extra_info"]["index"] for rows in asked.values() for row in rows]
    assert indexes == list(range(12))
    by_text = {FORMATS["search_r1"]().prompt(q, ()).messages[-1].content: q for q in QUESTIONS}
    for split, rows in asked.items():
        for row in rows:
            assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            question = by_text.pop(row["prompt"][-1]["content"])
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert (row["data_source"], row["ability"]) == ("toy", "fact-reasoning")
            assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Steven Spielberg"]}}
            assert row["extra_info"]["split"] == split
            assert in_test_split("toy", question.id, 0.3) is (split == "test")


def test_verl_indexes_differ_over_merged_data_sets(tmp_path):
    sets = [[Question(str(n), "Who?", ("A", "B"), dataset=name) for n in range(3)] for name in ("nq", "hotpotqa")]
    assert export_questions({"train": sets[0] + sets[1], "test": []}, tmp_path / "out") == {"train": 6}
    rows = read_parquet(tmp_path / "out/train.parquet", verl_schema())
    assert [row["extra_info"]["index"] for row in rows] == list(range(6))
    assert [row["data_source"] for row in rows] == ["nq"] * 3 + ["hotpotqa"] * 3
    assert not (tmp_path / "out/test.parquet").exists()


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_is_repeated_with_equal_bytes_and_never_into_anothers_folder(name, finished, tmp_path):
    export, out = EXPORTERS[name], tmp_path / "out"
    export(finished, out)
    first = {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"}
    export(finished, out)
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"} == first
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.jsonl").write_text("mine")
    for taken in (other, finished, finished / "pairs"):
        with pytest.raises(RunError, match="holds other files"):
            export(finished, taken)
    assert (other / "train.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"pairs.level": "trajectory"}, "whole trajectories"),
        ({"pairs.min_margin": 2.0}, "no pairs to export"),
    ],
)
def test_a_run_without_pairs_that_messages_can_hold_is_refused(overrides, reason, tmp_path):
    run(tmp_path / "run", overrides=overrides, questions=QUESTIONS[:3])
    for export in (export_json_lines, export_llamafactory):
        with pytest.raises(DataError, match=reason):
            export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EXPORTERS)
def test_what_is_no_run_is_refused(name, tmp_path):
    with pytest.raises(RunError, match=r"no readable run\.json"):
        EXPORTERS[name](Path(tmp_path), tmp_path / "out")
