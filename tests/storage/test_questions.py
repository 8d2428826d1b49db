"""Reading questions: every layout that users have, and one clear line for each thing that cannot work."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.types import Question
from reasonrag.storage.questions import KNOWN, load_questions, paragraph_corpus, questions_fingerprint, sample_questions
from tests.faults.matrix import Figure

DATA = Path(__file__).parents[2].parent / "shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA.name} is not beside the repository")


def row(i: object = "q1", **changes: object) -> dict[str, object]:
    return {"id": i, "question": "Who?", "golden_answers": ["Bob"], "metadata": {}} | changes


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def refusal(dataset: str, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        load_questions(dataset, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_gives_questions_named_after_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.set.jsonl", row(metadata={"type": "bridge"}))
    (question,) = load_questions(path)
    assert question == Question("q1", "Who?", ("Bob",), "toy.set")
    assert question.metadata == {"type": "bridge"}


def test_all_kinds_of_file_give_the_same_questions(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row(f"q{i}", metadata={"level": i}) for i in range(4)]
    lines = "\n".join(json.dumps(r) for r in rows)
    (tmp_path / "toy.jsonl").write_text(lines)
    (tmp_path / "toy.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "toy.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "toy.parquet")
    loaded = [load_questions(str(path)) for path in sorted(tmp_path.iterdir())]
    assert len(loaded) == 4 and all(questions == loaded[0] for questions in loaded)
    assert [q.metadata["level"] for q in loaded[-1]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "read"), [("Bob", ("Bob",)), (["Bob", None, "", " "], ("Bob",)), ([1755], ("1755",)), (1755, ("1755",))]
)
def test_golden_answers_may_be_a_list_a_text_or_a_number(tmp_path: Path, given: object, read: tuple[str, ...]) -> None:
    (question,) = load_questions(write(tmp_path / "a.jsonl", row(golden_answers=given)))
    assert question.golden_answers == read


@pytest.mark.parametrize("alias", ["answer", "answers"])
def test_answer_columns_of_other_names_are_read(tmp_path: Path, alias: str) -> None:
    (question,) = load_questions(write(tmp_path / "a.jsonl", {"id": 7, "question": "Who?", alias: "Bob", "hops": 2}))
    assert (question.id, question.golden_answers, question.metadata) == ("7", ("Bob",), {"hops": 2})


@pytest.mark.fault("29", "NaN in metadata, as pandas writes it", "read as no value")
def test_numpy_answers_and_nan_metadata_from_parquet_become_plain_python(tmp_path: Path, figure: Figure) -> None:
    import datasets
    import numpy as np

    columns = {
        "id": ["a"],
        "question": ["Who?"],
        "golden_answers": [np.array(["Bob", "Rob"])],
        "metadata": [{"rank": float("nan"), "hops": np.array([1, 2])}],
    }
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "a.parquet")
    (question,) = load_questions(str(tmp_path / "a.parquet"))
    assert question.golden_answers == ("Bob", "Rob")
    figure(f"a rank of NaN is read as {question.metadata['rank']}")
    assert question.metadata == {"rank": None, "hops": [1, 2]}


@pytest.mark.fault("28", "a question without an id, or with that of another", "refused with its line")
@pytest.mark.fault("29", "NaN, null or nothing as id, question or answers", "refused with its line")
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (row(question=None), "question missing or empty in 1 row (2)"),
        (row(question="  "), "question missing or empty in 1 row (2)"),
        (row(question=float("nan")), "question missing or empty in 1 row (2)"),
        (
            row(golden_answers=None),
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON in 1 row (2)",
        ),
        (
            row(golden_answers=[]),
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON in 1 row (2)",
        ),
        (
            row(golden_answers=[""]),
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON in 1 row (2)",
        ),
        (
            row(golden_answers=float("nan")),
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON in 1 row (2)",
        ),
        (row(golden_answers=[1], choices=["a", "b"]), "choices (write them into the question, and the right one as"),
        (row(None), "id missing or empty in 1 row (2)"),
        (row(float("nan")), "id missing or empty in 1 row (2)"),
        (row("first"), "duplicate id in 1 row (2 'first')"),
        (row(1.0), "id of type float in 1 row (2)"),
        (row(question=7), "question of type int in 1 row (2)"),
        ("a text", "not a JSON object in UTF-8 with each key once in 1 row (2)"),
    ],
)
def test_an_unusable_row_is_named(tmp_path: Path, bad: object, named: str, figure: Figure) -> None:
    message = refusal(write(tmp_path / "a.jsonl", row("first"), bad))
    figure("the second of two rows is named, in each of 14 kinds" if named in message else f"not named: {named}")
    assert named in message


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (
            {"golden_answers": ["Bob", {"text": "Rob"}]},
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON",
        ),
        (
            {"golden_answers": ["Bob", ["Rob"]]},
            "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON",
        ),
        ({"rubric": [{"criterion": "a year"}, "a name"]}, "rubric without a text"),
        ({"items": "Nantes; Brest"}, "items without a text"),
    ],
)
def test_what_grades_an_answer_is_never_read_in_part(tmp_path: Path, bad: dict[str, object], named: str) -> None:
    assert f"{named} in 1 row (2)" in refusal(write(tmp_path / "a.jsonl", row("first"), row(**bad)))


def test_answers_in_binary_are_refused(tmp_path: Path) -> None:
    columns = {"id": ["1"], "question": ["Who?"], "golden_answers": [[b"Bob"]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "golden_answers missing, empty, not all texts or numbers, or a list that is no JSON in 1 row (1)" in refusal(
        str(tmp_path / "a.parquet")
    )


def test_a_table_may_hold_lists_and_metadata_in_json(tmp_path: Path) -> None:
    row = """1,Who?,"[""Bob"", ""Rob""]","{""gold_ids"": [""p""]}","[[""Bob""], [""Al"", ""Alan""]]"\n"""
    (tmp_path / "a.csv").write_text("id,question,golden_answers,metadata,items\n" + row)
    (question,) = load_questions(str(tmp_path / "a.csv"))
    assert question.golden_answers == ("Bob", "Rob") and question.metadata["gold_ids"] == ["p"]
    assert question.items == (("Bob",), ("Al", "Alan"))


@pytest.mark.fault("28", "the ids 1 and '1'", "refused with the line of the second")
def test_ids_that_differ_only_as_number_and_text_collide(tmp_path: Path, figure: Figure) -> None:
    message = refusal(write(tmp_path / "a.jsonl", row(1), row("1")))
    figure(message.partition("; ")[0].rpartition("/")[2])
    assert "duplicate id in 1 row (2 '1')" in message


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-20])
    (tmp_path / "text.jsonl.gz").write_bytes(b"plain text")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut off")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "one.json").write_text("{}")
    (tmp_path / "a.txt").write_text("id")
    messages = {path.name: refusal(str(path)) for path in tmp_path.iterdir()}
    assert "complete" in messages["cut.jsonl.gz"] and "complete" in messages["text.jsonl.gz"]
    assert "Parquet" in messages["cut.parquet"] and "no questions" in messages["empty.jsonl"]
    assert "list of rows" in messages["one.json"] and "unknown kind of file" in messages["a.txt"]


def test_unknown_name_gets_the_list() -> None:
    message = refusal("hotpot_qa")
    assert all(name in message for name in KNOWN)


def test_unknown_split_gets_the_list() -> None:
    assert "no split 'train'; it has test" in refusal("popqa", split="train")


def test_limit_takes_a_seeded_sample_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(row(f"{i:03}") for i in range(100)))
    questions = load_questions(path)
    ids = [q.id for q in sample_questions(questions, 10, seed=3)]
    assert ids == sorted(ids) and len(set(ids)) == 10
    assert ids == [q.id for q in sample_questions(questions, 10, seed=3)]
    assert ids != [q.id for q in sample_questions(questions, 10, seed=4)]
    assert sample_questions(questions, 1000) == questions


PARAGRAPHS = [("Jaws", "A film. By Spielberg."), ("Ed Wood", "A director.")]


@pytest.mark.parametrize(
    "metadata",
    [
        {"context": {"title": ["Jaws", "Ed Wood"], "sentences": [["A film.", " By Spielberg."], ["A director."]]}},
        {"context": {"title": ["Jaws", "Ed Wood"], "content": [["A film.", "By Spielberg."], ["A director."]]}},
        {"context": [["Jaws", ["A film.", "By Spielberg."]], ["Ed Wood", ["A director."]]]},
        {"paragraphs": [{"title": t, "paragraph_text": x, "idx": i} for i, (t, x) in enumerate(PARAGRAPHS)]},
    ],
)
def test_paragraphs_are_read_from_every_layout(metadata: dict[str, object]) -> None:
    corpus = paragraph_corpus([Question(name, "?", ("a",), metadata=metadata) for name in ("1", "2")])
    assert [(p.title, p.text) for p in corpus] == PARAGRAPHS
    assert corpus[0].id == hashlib.sha1(b"Jaws\nA film. By Spielberg.").hexdigest()[:12]


@pytest.mark.parametrize("metadata", [{}, {"context": []}, {"context": {}}, {"context": [["Jaws", []]]}])
def test_without_paragraphs_a_corpus_is_asked_for(metadata: dict[str, object]) -> None:
    with pytest.raises(DataError, match="--corpus"):
        paragraph_corpus([Question("1", "?", ("a",), metadata=metadata)])


@pytest.mark.parametrize(
    "context", [{"sentences": []}, {"title": ["a"], "text": []}, [["a"]], [{"x": 1}], 5, [[1, [2]]]]
)
def test_unknown_layouts_are_refused_by_name(context: object) -> None:
    with pytest.raises(DataError, match="question 'q9': its context is in an unknown layout"):
        paragraph_corpus([Question("q9", "?", ("a",), metadata={"context": context})])


def test_fingerprint_follows_ids_texts_answers_and_order() -> None:
    a, b = Question("a", "Who?", ("x",)), Question("b", "Who?", ("x",))
    prints = [
        questions_fingerprint(q)
        for q in ([a, b], [b, a], [a], [Question("a", "Who?", ("y",)), b], [Question("a", "What?", ("x",)), b])
    ]
    assert len(set(prints)) == 5 and all(len(p) == 16 for p in prints)
    assert prints[0] == questions_fingerprint([replace(a, metadata={"k": 1}), b])
    # Seeds and the journal know a question by its data set's name and its id.
    assert prints[0] != questions_fingerprint([replace(a, dataset="elsewhere"), b])


@pytest.mark.data
@needs_data
@pytest.mark.parametrize(("name", "count"), [("2wikimultihopqa", 445), ("musique", 221), ("popqa", 644)])
def test_real_files_load_whole(name: str, count: int) -> None:
    questions = load_questions(str(DATA / f"questions/{name}.jsonl"))
    assert len(questions) == count and {q.dataset for q in questions} == {name}
