"""Several data sets in one run, and questions that are left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import DataError, RunError
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import open_questions, open_retriever
from reasonrag.storage.parquet import read_shards, write_parquet
from reasonrag.storage.tables import rollout_schema, tree_schema

SHIPS = ("Orlandis", "Quillfane", "Maravand", "Tessarine", "Volanthe", "Wyndelow")
CAPTAINS = ("Benna Ruvik", "Tomas Eskel", "Idris Polwen", "Orrin Caddow", "Piet Harrowgill", "Freya Tolmark")


def ship_row(number):
    ship, captain = SHIPS[number], CAPTAINS[number]
    context = [[ship, [f"{ship} is a sailing ship. ", f"The captain of {ship} was {captain}."]]]
    asked = f"Who was the captain of {ship}?"
    return {"id": str(number), "question": asked, "golden_answers": [captain], "metadata": {"context": context}}


def town_row(number):
    context = {"title": [CAPTAINS[number]], "sentences": [[f"{CAPTAINS[number]} was born in {SHIPS[number]}town."]]}
    asked = f"Where was {CAPTAINS[number]} born?"
    answers = [f"{SHIPS[number]}town"]
    return {"id": str(number), "question": asked, "golden_answers": answers, "metadata": {"context": context}}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Two data sets with the same ids, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, row in (("ships", ship_row), ("towns", town_row)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(len(SHIPS))))
    return "ships.jsonl, towns.jsonl"


def config(dataset, **overrides):
    settings = {"policy.spec": "extractive", "retrieval.cache": "cache", "search.iterations": 4}
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(overrides=settings | {"questions.dataset": dataset} | named)


def keys(dataset, **overrides):
    return [(question.dataset, question.id) for question in open_questions(config(dataset, **overrides))]


def test_data_sets_are_merged_and_equal_ids_stay_apart(both):
    summary = build_trees(config(both, questions__limit=3, seed=5), Path("run"))
    assert summary["questions"] == {"total": 6, "finished": 6, "failed": {}}
    roots = [row for row in read_shards(Path("run/trees"), "nodes", tree_schema()) if row["parent_id"] == -1]
    by_set = Counter(row["dataset"] for row in roots)
    assert by_set == {"ships": 3, "towns": 3}, "the limit is one of each"
    assert [(row["dataset"], row["question_id"]) for row in roots] == keys(both, questions__limit=3, seed=5)
    for name in ("ships", "towns"):
        alone = keys(f"{name}.jsonl", questions__limit=3, seed=5)
        assert [key for key in keys(both, questions__limit=3, seed=5) if key[0] == name] == alone
    # What a run was built on is not evaluated: by text in files of any name, by data set and id too.
    rest = keys(both, questions__exclude="run")
    assert Counter(key[0] for key in rest) == {"ships": 3, "towns": 3}
    assert not set(rest) & {(row["dataset"], row["question_id"]) for row in roots}
    Path("ships.jsonl").rename("renamed.jsonl")
    assert {key[1] for key in keys("renamed.jsonl", questions__exclude=["run"])} == {
        k[1] for k in rest if k[0] == "ships"
    }


def test_what_an_online_training_saw_is_left_out(both):
    seen = {**dict.fromkeys(rollout_schema().names), "dataset": "ships", "golden_answers": ["x"]}
    for step, ids in ((1, "03"), (2, "35")):
        rows = [seen | {"question_id": id, "question": ship_row(int(id))["question"], "step": step} for id in ids]
        Path("policy/rollouts").mkdir(parents=True, exist_ok=True)
        write_parquet(Path(f"policy/rollouts/step-{step:06d}.parquet"), rows, rollout_schema())
    rest = keys(both, questions__exclude="policy")
    assert [id for name, id in rest if name == "ships"] == ["1", "2", "4"]
    assert len([id for name, id in rest if name == "towns"]) == len(CAPTAINS)
    Path("policy/training.json").write_text('{"steps": 6, "settings": {"rollout": {"minibatches": 2}}}')
    with pytest.raises(RunError, match="lacks those of 1 steps; bring them back from a copy"):
        keys(both, questions__exclude="policy")


def test_every_data_set_needs_paragraphs_if_they_are_searched(both):
    rows = [{**town_row(number), "metadata": {}} for number in range(3)]
    Path("bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for dataset, named in ((f"{both},bare.jsonl", "bare"), ("demo,ships.jsonl", "demo")):
        settings = config(dataset)
        with pytest.raises(DataError, match=f"questions of {named} carry no paragraphs"):
            open_retriever(settings, open_questions(settings))


def test_a_split_is_that_of_one_set_or_of_all():
    assert len(keys("demo:dev")) == len(keys("demo", questions__split="dev")) < len(keys("demo"))
    assert keys("demo:dev,demo:test") == keys("demo:dev") + keys("demo:test")
    with pytest.raises(DataError, match="comes twice"):
        keys("demo,demo:train")


def test_a_file_names_questions_by_text_whatever_their_ids(both, tmp_path):
    other = tmp_path / "other.jsonl"
    rows = ({"id": "3", "question": " who was the captain of  ORLANDIS? "}, {"id": "1", "question": "Something else?"})
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [key[1] for key in keys("ships.jsonl", questions__exclude=str(other))] == list("12345")


def test_what_cannot_be_left_out_is_refused(both, tmp_path):
    with pytest.raises(DataError, match=r"names all questions"):
        keys("ships.jsonl", questions__exclude="ships.jsonl")
    Path("odd.jsonl").write_text('{"text": "no question"}\n')
    with pytest.raises(DataError, match=r"question missing or empty in 1 row \(1\)"):
        keys("ships.jsonl", questions__exclude="odd.jsonl")
    with pytest.raises(RunError, match=r"run\.json"):
        keys("ships.jsonl", questions__exclude=str(tmp_path))
    with pytest.raises(DataError, match=r"none\.jsonl"):
        keys("ships.jsonl", questions__exclude="none.jsonl")
