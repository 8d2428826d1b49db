"""Questions and passages of a real comparison: disjoint splits, one corpus, and what is wrong with a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from papers import PAPERS
from papers.comparison import stages
from papers.real import DATA_SETS, OURS, SPLITS, prepare, split_of
from reasonrag.core.errors import DataError
from reasonrag.storage.questions import load_questions


def write_data(folder: Path, questions: int = 40) -> Path:
    """Three invented data sets whose questions and passages have the same ids, and a model's folder beside them."""
    for name in DATA_SETS:
        (folder / "questions").mkdir(parents=True, exist_ok=True)
        (folder / "corpus").mkdir(exist_ok=True)
        with (folder / "questions" / f"{name}.jsonl").open("w") as file:
            for number in range(questions):
                gold = {"gold_ids": [f"p{number // 2}"], "answerable": number != 3}
                row = {"id": f"q{number}", "question": f"{name} {number}?", "golden_answers": ["x"], "metadata": gold}
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
    assert len(where) == 3 * 39  # one is unanswerable
    with gzip.open(tmp_path / "out" / "data" / "corpus.jsonl.gz", "rt") as lines:
        passages = [json.loads(line) for line in lines]
    ours = [passage for passage in passages if passage["id"].startswith(OURS)]
    assert len(passages) == 40 + len(ours) == len({passage["contents"] for passage in passages})
    counts = json.loads((tmp_path / "out" / "data" / "splits.json").read_text())
    assert counts["passages"] == len(passages) and 0 < counts["shared"] <= sum(counts["test"].values())
    assert (tmp_path / "out" / "model").resolve() == data.resolve()


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


def test_no_command_trains_on_what_is_evaluated_or_names_a_place_outside_its_folder():
    plan = stages(PAPERS["real"], Path("OUT"), PAPERS["real"].scale)
    for stage in plan:
        assert ("data/test/" in stage.line) == (stage.arguments[0] == "eval")
        assert not any(argument.startswith("/") for argument in stage.arguments)
    line_of = {stage.out.name: stage.line for stage in plan if stage.out.parent.name == "seed-0"}
    assert "data/demonstrations/" in line_of["demonstrations"]
    assert "data/search/" in line_of["trees"] and "data/search/" in line_of["grpo"]
