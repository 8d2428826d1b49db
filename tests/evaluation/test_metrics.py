from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from reasonrag.core.types import (
    Answer,
    Completion,
    Malformed,
    Message,
    Note,
    Prompt,
    Question,
    Search,
    Step,
    StopReason,
    Trajectory,
)
from reasonrag.evaluation.metrics import (
    METRICS,
    NOT_JUDGED,
    Attempt,
    StepCounts,
    Verdicts,
    attempt_values,
    hops,
    kind,
    trajectory_row,
)
from reasonrag.formats import ReasonRAGFormat
from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.questions import load_questions
from reasonrag.storage.tables import trajectory_schema
from tests.toys import QUESTION, SPIELBERG

DATA = Path(__file__).parents[2].parent / "shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside the repository")

FORMAT = ReasonRAGFormat()
PROMPT = Prompt((Message("user", "?"),))


def ended(*actions, stop=StopReason.ANSWERED, tokens=(10, 2), question=QUESTION) -> Trajectory:
    steps = tuple(
        Step(
            PROMPT,
            Completion("text", prompt_tokens=tokens[0], completion_tokens=tokens[1]),
            action,
            (SPIELBERG,) if isinstance(action, Search) else (),
        )
        for action in actions
    )
    return Trajectory(question, steps, stop)


def scores(trajectory, reading=None, rules="house"):
    """The metrics that need no judge."""
    values = attempt_values(Attempt(trajectory, reading, rules=rules))
    return {name: values[name] for name, metric in METRICS.items() if not metric.judged}


def test_a_trajectory_is_scored_on_every_metric():
    found = scores(ended(Search("Jaws"), Note("x"), Search("Jaws"), Answer("the Steven Spielberg")))
    assert found == {
        "em": 1.0,
        "f1": 1.0,
        "acc": 1.0,
        "retrievals": 2,
        "steps": 4,
        "forced": 0,
        "format_rate": 1.0,
        "prompt_tokens": 40,
        "completion_tokens": 8,
    }


def test_a_missing_answer_scores_zero_and_is_no_forced_answer():
    found = scores(ended(Malformed("no_tag"), stop=StopReason.NO_ANSWER))
    assert (found["em"], found["f1"], found["acc"], found["forced"], found["format_rate"]) == (0.0, 0.0, 0.0, 0, 0.0)


def test_tokens_are_unknown_unless_every_step_reports_them():
    whole = ended(Search("Jaws"), Answer("x"))
    partly = Trajectory(QUESTION, (whole.steps[0], ended(Answer("x"), tokens=(7, None)).steps[0]), StopReason.ANSWERED)
    assert (scores(whole)["prompt_tokens"], scores(whole)["completion_tokens"]) == (20, 4)
    assert (scores(partly)["prompt_tokens"], scores(partly)["completion_tokens"]) == (17, None)


def test_a_trajectory_that_goes_on_has_no_scores():
    with pytest.raises(ValueError, match="not ended"):
        scores(Trajectory(QUESTION))


def test_a_trajectory_survives_as_a_row_with_its_raw_text(tmp_path):
    hostile = "<answer>\x1b[31m</answer>\u202e"
    step = Step(PROMPT, Completion(hostile), Answer("\x1b[31m"))
    rows = [row(Trajectory(QUESTION, (step,), StopReason.ANSWERED)), row(ended(Search("a"), Note(""), Answer("b")))]
    write_parquet(tmp_path / "t.parquet", rows, schema())
    read, other = read_parquet(tmp_path / "t.parquet", schema())
    assert (read["trajectory"][0]["text"], read["answer"], read["prompt_tokens"]) == (hostile, "\x1b[31m", None)
    assert [s["action"] for s in other["trajectory"]] == ["query", "evidence", "answer"]
    assert [len(s["passages"]) for s in other["trajectory"]] == [1, 0, 0]
    assert (other["retrievals"], other["steps"], other["hops"], other["kind"]) == (1, 3, None, "")


def test_a_row_says_why_an_attempt_is_out_of_form_and_what_a_judge_found():
    found = row(ended(Malformed("no_tag"), stop=StopReason.NO_ANSWER))
    assert (found["well_formed"], found["reason"], found["format_rate"]) == (False, "no_tag", 0.0)
    assert [found[name] for name in ("lasj", "steps_over", "searches_known", "steps_under")] == [None] * 4
    verdicts = Verdicts(False, StepCounts(1, 3, 0), StepCounts(0, 0, 2))
    found = row(ended(Answer("x")), verdicts)
    assert (found["well_formed"], found["reason"], found["lasj"]) == (True, "", False)
    assert [found[name] for name in ("steps_over", "searches_known", "steps_under", "own_steps_known")] == [1, 3, 0, 0]


def row(trajectory, verdicts=NOT_JUDGED):
    attempt = Attempt(trajectory, FORMAT.read(trajectory), verdicts)
    return trajectory_row(attempt, attempt_values(attempt))


def schema():
    return trajectory_schema()


def asked(id="q", **metadata) -> Question:
    return Question(id, "?", ("x",), metadata=metadata)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (asked(), ("", None)),
        (asked(kind="bridge", hops=2, known=False), ("bridge", 2)),
        (asked(kind="one_hop", hops=1, known=True), ("known", 1)),
        (asked(type="comparison"), ("comparison", None)),
        (asked("2hop__460946_294723"), ("2hop", 2)),
        (asked("3hop2__1_2_3", type="3hop2"), ("3hop", 3)),
        (asked("2hopeful"), ("", None)),
        (asked(hops=True), ("", None)),
        (asked(type="a\nb" + "c" * 100), ("a b" + "c" * 57, None)),
        (asked(type=["x"]), ("", None)),
    ],
)
def test_kind_and_hops_are_what_the_data_set_says(question, expected):
    assert (kind(question), hops(question)) == expected


@pytest.mark.data
@needs_data
def test_kinds_and_hops_of_the_multi_hop_sets_are_those_of_their_papers():
    found = {
        name: Counter((kind(q), hops(q)) for q in load_questions(str(DATA / f"questions/{name}.jsonl")))
        for name in ("hotpotqa", "2wikimultihopqa", "musique", "popqa")
    }
    assert found["hotpotqa"] == {("bridge", None): 250, ("comparison", None): 85}
    assert found["2wikimultihopqa"] == {
        ("compositional", None): 197,
        ("comparison", None): 142,
        ("bridge_comparison", None): 85,
        ("inference", None): 21,
    }
    assert found["musique"] == {("2hop", 2): 159, ("3hop", 3): 41, ("4hop", 4): 21}
    assert found["popqa"] == {("", None): 644}


def recorded(pattern):
    """Prediction, golden answers, recorded em / f1 / acc of each row of the score files."""
    for path in sorted((DATA / "scores").glob(pattern)):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            rows = json.load(file) if path.suffixes[0] == ".json" else [json.loads(line) for line in file]
        for row in rows:
            noted = row["output"]["metric_score"] if "output" in row else row
            prediction = row["output"]["pred"] if "output" in row else row["prediction"]
            kept = {name: float(noted[name]) for name in ("em", "f1", "acc") if name in noted}
            yield prediction, tuple(row["golden_answers"]), kept


@pytest.mark.data
@needs_data
@pytest.mark.parametrize(
    ("pattern", "rows", "compared"),
    [("search_r1_*.jsonl.gz", 2132, 6396), ("fireact_*.jsonl.gz", 642, 1284), ("flashrag_*.json.gz", 82, 246)],
)
def test_every_recorded_score_is_that_of_a_trajectory_with_that_answer(pattern, rows, compared):
    wrong, count, number = [], 0, 0
    for number, (prediction, golden, noted) in enumerate(recorded(pattern), 1):
        question = Question(str(number), "?", golden)
        trajectory = ended(Answer(prediction), question=question)
        found = scores(trajectory, rules="flashrag")
        count += len(noted)
        wrong += [(prediction, golden, name) for name, score in noted.items() if abs(found[name] - score) > 1e-9]
    assert (wrong, number, count) == ([], rows, compared)
