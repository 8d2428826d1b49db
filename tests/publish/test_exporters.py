from __future__ import annotations

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import in_test_split
from reasonrag.dpo.preferences import Unusable, read_row
from reasonrag.dpo.token_rows import encode
from reasonrag.formats import FORMATS
from reasonrag.formats.stream import SearchR1Format
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.publish.exporters import (
    EXPORTERS,
    description,
    export_pairs,
    export_questions,
    export_trl,
    sharegpt,
    verl_schema,
)
from reasonrag.storage.parquet import read_parquet, read_shards, write_parquet
from reasonrag.storage.questions import KNOWN
from reasonrag.storage.tables import pair_schema
from tests.llm.tiny import save_tiny_model
from tests.pipeline.test_build import QUESTIONS, run
from tests.publish.toys import says

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
    counts = EXPORTERS["llamafactory"](finished, tmp_path / "out")
    described = json.loads((tmp_path / "out/dataset_info.json").read_text())
    assert described.keys() == {"reasonrag_train", "reasonrag_test"}
    for split in ("train", "test"):
        info = described[f"reasonrag_{split}"]
        rows, given = lines(tmp_path / "out" / info["file_name"]), pairs(finished, split)
        assert len(rows) == len(given) == counts[split] > 0
        for row, pair in zip(rows, given, strict=True):
            assert row.keys() > set(info["columns"].values())
            assert (row["question_id"], row["margin"]) == (pair["question_id"], pair["margin"])
            system, asked, sides = aligned(info, row)
            assert [says("system", system), says("user", asked[0])] == pair["prompt"]
            assert sides == [pair[side][0]["content"] for side in ("chosen", "rejected")]


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


def stream_policy(prompt, sampling):
    draw = random.Random(f"{prompt}{sampling.seed}").random()
    if prompt.stop == ("</answer>",) or draw < 0.5:
        answer = "Steven Spielberg</answer>" if draw < 0.35 else "nobody</answer>\n"
        return answer if prompt.stop == ("</answer>",) else f"<think>I know</think> <answer>{answer}"
    return f"<think>I do not know</think> <search>Jaws {draw:.2f}</search>" if draw < 0.75 else "The river"


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "growing"
    every = {"pairs.rule": "siblings", "pairs.min_confidence": 0, "pairs.per_question": 0, "pairs.test_share": 0.3}
    run(out, stream_policy, overrides=every, questions=QUESTIONS[:6], format=SearchR1Format())
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_pairs_of_a_growing_turn_become_texts_in_which_trl_finds_our_tokens(growing, model, tmp_path):
    export_trl(growing, tmp_path / "out", tokenizer=model)
    chat = ChatTemplate.load(model)
    eos, given = chat.tokenizer.eos_token_id, pairs(growing, "train")
    written = lines(tmp_path / "out/train.jsonl")
    assert any(pair["prompt"][-1]["role"] == "assistant" for pair in given)
    # What `dpo train` tokenises as TRL does, and what it reads from the pairs themselves.
    as_trl, _ = encode([read_row("", row) for row in written], chat)
    as_ours, _ = encode([read_row("", pair) for pair in given], chat)
    ends = set()
    for trl, ours, pair in zip(as_trl, as_ours, given, strict=True):
        for side in ("chosen", "rejected"):
            (theirs,), (own,) = getattr(trl, side), getattr(ours, side)
            ended = () if pair[f"{side}_end"] == "turn" else (eos,)
            assert theirs.prompt_ids + theirs.completion_ids == own.prompt_ids + own.completion_ids + ended
            ends.add(pair[f"{side}_end"])
    assert ends == {"stop", "turn"}
    assert {row["question_id"] for row in written} == {pair["question_id"] for pair in given}


def test_verl_rows_have_the_documented_fields_and_types(finished, tmp_path):
    counts = export_questions(finished, tmp_path / "out")
    assert sum(counts.values()) == len(QUESTIONS) and counts["test"] > 0
    asked = {split: read_parquet(tmp_path / f"out/{split}.parquet", verl_schema()) for split in counts}
    indexes = [row["extra_info"]["index"] for rows in asked.values() for row in rows]
    assert indexes == list(range(12))
    by_text = {FORMATS["search_r1"]().prompt(q, ()).messages[-1].content: q for q in QUESTIONS}
    for split, rows in asked.items():
        for row in rows:
            assert list(row) == verl_schema().names
            question = by_text.pop(row["prompt"][-1]["content"])
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert (row["data_source"], row["ability"]) == ("toy", "fact-reasoning")
            assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Steven Spielberg"]}}
            assert row["reward_spec"] == {"method": "rule", "ground_truth": {"target": ["Steven Spielberg"]}}
            assert row["extra_info"]["split"] == split
            assert in_test_split(("toy", question.id), 0.3) is (split == "test")


def test_a_known_data_set_has_the_name_that_its_scorer_knows(tmp_path):
    # The names that verl 0.9.1 and Search-R1 score (`make peers`).
    assert list(KNOWN) == ["hotpotqa", "2wikimultihopqa", "musique", "popqa", "bamboogle", "nq", "triviaqa"]
    sets = [Question(str(n), "Who?", ("A", "B"), dataset=name) for name in ("popqa", "mine") for n in range(2)]
    run(tmp_path / "run", questions=sets, overrides={"pairs.test_share": 0.0})
    assert export_questions(tmp_path / "run", tmp_path / "verl") == {"train": 4}
    assert export_questions(tmp_path / "run", tmp_path / "search", tool="search-r1") == {"train": 4}
    for place, names in (("verl", ["searchR1_popqa"] * 2 + ["mine"] * 2), ("search", ["popqa"] * 2 + ["nq"] * 2)):
        rows = read_parquet(tmp_path / place / "train.parquet", verl_schema())
        assert [row["data_source"] for row in rows] == names
        assert [row["extra_info"]["index"] for row in rows] == list(range(4))
        assert [row["extra_info"]["dataset"] for row in rows] == ["popqa"] * 2 + ["mine"] * 2
        assert not (tmp_path / place / "test.parquet").exists()


def test_questions_that_a_rule_would_reward_with_0_are_not_exported(tmp_path):
    items = [Question(str(n), "Which?", (), dataset="lists", items=(("A",), ("B", "C"))) for n in range(2)]
    run(tmp_path / "run", questions=items, overrides={"outcome.name": "list"})
    with pytest.raises(DataError, match="2 questions have no golden answers, and verl would reward every answer"):
        export_questions(tmp_path / "run", tmp_path / "verl")


def test_search_r1_is_asked_in_one_user_turn_with_the_sentences_that_the_user_gives(finished, tmp_path):
    prompts = tmp_path / "prompts/search_r1"
    prompts.mkdir(parents=True)
    (prompts / "instruction.txt").write_text("Answer. For example, <answer> Beijing </answer>.\n")
    export_questions(finished, tmp_path / "out", tool="search-r1", prompts=str(prompts.parent))
    row = read_parquet(tmp_path / "out/train.parquet", verl_schema())[0]
    asked = "Answer. For example, <answer> Beijing </answer>. Question: Who directed film "
    assert row["prompt"][0]["role"] == "user" and len(row["prompt"]) == 1
    assert re.fullmatch(re.escape(asked) + r"\d+\?\n", row["prompt"][0]["content"])
    (prompts / "instruction.txt").write_text("Answer in <answer>.")
    with pytest.raises(ConfigError, match="every response would score 0"):
        export_questions(finished, tmp_path / "again", tool="search-r1", prompts=str(prompts.parent))


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_export_is_repeated_with_equal_bytes_and_never_into_anothers_folder(name, finished, model, tmp_path):
    needed = {"tokenizer": model} if name == "trl" else {}
    export, out = partial(EXPORTERS[name], **needed), tmp_path / "out"
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
    [({"pairs.level": "trajectory"}, "whole trajectories"), ({"pairs.min_margin": 2.0}, "no pairs to export")],
)
def test_a_run_without_pairs_that_messages_can_hold_is_refused(overrides, reason, tmp_path):
    run(tmp_path / "run", overrides=overrides, questions=QUESTIONS[:3])
    for export in (export_pairs, EXPORTERS["llamafactory"]):
        with pytest.raises(DataError, match=reason):
            export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pairs_that_a_kill_left_in_part_are_not_exported(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    write_parquet(tmp_path / "run/pairs/train-00000-of-00001.parquet", pairs(finished, "train")[1:], pair_schema())
    with pytest.raises(DataError, match=r"train pairs found and \d+ in run.json; write them again"):
        export_pairs(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_what_is_no_run_is_refused(name, tmp_path):
    with pytest.raises(RunError, match=r"with a readable run\.json"):
        EXPORTERS[name](Path(tmp_path), tmp_path / "out")
