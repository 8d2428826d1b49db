"""A real comparison: disjoint splits and one corpus, what is wrong with a folder, and who is served when."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from papers import PAPERS
from papers.comparison import stages
from papers.plan import ADDRESS
from papers.real import DATA_SETS, SPLITS, prepare, split_of
from reasonrag.core.errors import DataError
from reasonrag.storage.questions import load_questions


def write_data(folder: Path, questions: int = 120) -> Path:
    """Invented data sets whose questions and passages have the same ids, and a model's folder beside them."""
    for name in DATA_SETS:
        (folder / "questions").mkdir(parents=True, exist_ok=True)
        (folder / "corpus").mkdir(exist_ok=True)
        with (folder / "questions" / f"{name}.jsonl").open("w") as file:
            for number in range(questions):
                gold = {"gold_ids": [f"p{number // 2}"] if number != 4 else [], "answerable": number != 3}
                asked = f"{name} {max(number, 1)}?"  # the first two are the same
                row = {"id": f"q{number}", "question": asked, "golden_answers": ["x"], "metadata": gold}
                file.write(json.dumps(row) + "\n")
        with gzip.open(folder / "corpus" / f"{name}.jsonl.gz", "wt") as file:
            for number in range(questions):
                file.write(json.dumps({"id": f"p{number}", "contents": f"Title {number}\ntext"}) + "\n")
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def test_every_question_is_in_one_split_and_every_passage_once(tmp_path):
    data = write_data(tmp_path / "data")
    prepare(data, data, tmp_path / "out")
    where = {}
    for split in SPLITS:
        for name in DATA_SETS:
            questions = load_questions(str(tmp_path / "out" / "data" / split / f"{name}.jsonl"))
            for question in questions:
                assert where.setdefault((name, question.id), split) == split == split_of(name, question.id)
                assert question.dataset == name
    assert len(where) == 5 * 117  # one is unanswerable, one has no passage, one is asked twice
    with gzip.open(tmp_path / "out" / "data" / "corpus.jsonl.gz", "rt") as lines:
        passages = [json.loads(line) for line in lines]
    assert len(passages) == 120 == len({passage["contents"] for passage in passages})
    counts = json.loads((tmp_path / "out" / "data" / "splits.json").read_text())
    assert counts["passages"] == len(passages) and 0 < counts["shared"] <= sum(counts["test"].values())
    assert (tmp_path / "out" / "model" / "config.json").samefile(data / "config.json")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda data: (data / "config.json").unlink(), "no config.json"),
        (lambda data: (data / "questions" / "musique.jsonl").unlink(), r"musique.jsonl cannot be read \(FileNotFound"),
        (lambda data: (data / "corpus" / "musique.jsonl.gz").write_bytes(b"no gzip"), "cannot be read"),
        (lambda data: write_data(data, questions=2), "no question of hotpotqa falls into the split"),
    ],
)
def test_what_is_wrong_with_the_model_or_the_data_is_said(tmp_path, break_it, said):
    data = write_data(tmp_path / "data")
    break_it(data)
    with pytest.raises(DataError, match=said):
        prepare(data, data, tmp_path / "out")


def test_no_command_trains_on_what_is_evaluated_or_on_questions_of_another_round():
    plan = stages(PAPERS["real"], Path("OUT"), replace(PAPERS["real"].scale, seeds=2))
    for stage in plan:
        assert ("data/test/" in stage.line) == (stage.arguments[0] == "eval") and "data/dev/" not in stage.line
        assert not any(argument.startswith("/") for argument in stage.arguments)
    asked = {stage.out.name: stage.arguments[2] for stage in plan if stage.arguments[0] == "build-tree"}
    splits = {name: Path(sets.split(",")[0]).parent.name for name, sets in asked.items()}
    assert (splits["trees-reader"], splits["trees-builder"]) == ("demonstrations", "search-1")
    assert splits["trees-dpo"] == splits["trees-rejection"] == "search-2"
    assert sum(stage.out == Path("OUT/seed-0/sft-reader") for stage in plan) == 1, "the seeds share the cold start"
    assert sum("--policy sft-reader=" in stage.line for stage in plan) == 2, "and each evaluates it"


def test_a_served_policy_is_asked_by_address_while_its_folder_is_served():
    plan = stages(replace(PAPERS["real"], is_served=True), Path("OUT"), PAPERS["real"].scale)
    served = {stage.out: stage for stage in plan if stage.serves is not None}
    assert all(ADDRESS in stage.line for stage in served.values()) and "hf:" not in "".join(s.line for s in plan)
    assert served[Path("OUT/seed-0/trees-dpo")].serves == Path("OUT/seed-0/dpo/merged")
    assert served[Path("OUT/seed-0/eval/rag")].serves == Path("OUT/model")
    assert not any(stage.serves for stage in plan if "train" in stage.arguments or "extractive" in stage.line)
