from __future__ import annotations

import json
import re
import shutil
from statistics import fmean

import pytest

from reasonrag.core.bootstrap import Interval, intervals
from reasonrag.evaluation.metrics import METRICS as REGISTRY
from reasonrag.evaluation.metrics import Metric
from reasonrag.evaluation.tables import differences_table, results_table, summary_table, write_report
from reasonrag.report.attempt_pages import write_evaluation_pages as write_report_pages
from tests.evaluation.test_run import toys
from tests.evaluation.toy_policies import RECORD, evaluate, write_questions
from tools.recompute import of_evaluation

METRICS = [metric.name for metric in REGISTRY.values() if not metric.judged]
KINDS = ["bridge", "| [x](http://evil) <b>\x1b[31m"]


@pytest.fixture(autouse=True)
def fresh_record():
    RECORD.clear()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("compared") / "out"


@pytest.fixture(scope="module")
def compared(out):
    """`direct` is right at even numbers, `searcher` where three does not divide; question 5 fails for both."""
    RECORD.clear()
    RECORD.fails = {5}
    configs = toys(write_questions(out.parent / "toy.jsonl"), "direct", "searcher")
    return evaluate(configs, out, max_steps=[8, 2], top_ks=[1, 3])


def differences(places):
    return [float(n % 3 != 0) - float(n % 2 == 0) for n in places]


def test_differences_are_paired_by_question_as_by_hand(compared):
    (row,) = (r for r in compared["differences"] if r["metric"] == "em" and r["setting"] == "t1_s8_k1")
    by_hand = differences(n for n in range(12) if n != 5)
    expected = intervals({"em": by_hand}, seed=0)["em"]
    assert Interval(*(row[name] for name in ("mean", "low", "high", "n"))) == expected
    assert row["mean"] == pytest.approx(fmean(by_hand))
    assert (row["policy"], row["baseline"], row["baseline_setting"], row["n"]) == ("searcher", "direct", "t1_s8_k1", 11)
    of_kind = {kind: of["mean"] for kind, of in row["by_kind"].items()}
    assert of_kind == {
        KINDS[0]: pytest.approx(fmean(differences([0, 1, 2, 4, 6, 8, 9, 10]))),
        KINDS[1]: pytest.approx(fmean(differences([3, 7, 11]))),
    }


def test_every_interval_can_be_computed_anew_from_the_trajectories(compared, out):
    again = of_evaluation(out)
    settings, kinds = 4, 2
    assert again.intervals == (2 + 1) * settings * (1 + kinds) * len(METRICS)
    assert again.largest < 1e-9


def test_every_metric_of_every_policy_and_setting_has_an_interval_and_n(compared):
    assert (compared["policy"], compared["setting"]) == ("direct", "t1_s8_k1")
    assert list(compared["policies"]) == ["direct", "searcher"]
    for settings in compared["policies"].values():
        assert list(settings) == ["t1_s8_k1", "t1_s8_k3", "t1_s2_k1", "t1_s2_k3"]
        for of in settings.values():
            assert all(of[metric]["low"] <= of[metric]["mean"] <= of[metric]["high"] for metric in METRICS)
            assert {of[metric]["n"] for metric in METRICS} == {11}
            assert [kind["em"]["n"] for kind in of["by_kind"].values()] == [8, 3]
    assert compared["policies"]["direct"]["t1_s8_k1"]["em"] == compared["em"]
    assert compared["policies"]["searcher"]["t1_s2_k1"]["forced"]["mean"] == 1
    assert len(compared["differences"]) == 4 * len(METRICS)
    assert compared["dataset"] == ["toy"] and compared["seed"] == 0 and "reasonrag" in compared["versions"]


def test_metrics_json_holds_no_path_of_this_machine(compared, out):
    for path in (out / "metrics.json", out / "report.md"):
        assert str(out.parent) not in path.read_text()


def test_the_report_shows_each_difference_once_and_marks_those_that_exclude_zero(compared, out):
    page = (out / "report.md").read_text()
    marked = re.findall(r"\*\*[+-]?[\d.]+ \[.*?\]\*\*", page)
    sure = [row for row in compared["differences"] if row["low"] > 0 or row["high"] < 0]
    assert len(marked) == len(sure) > 0
    assert page.count("| searcher | t1_s8_k1 | direct | 11 |") == 1


def test_the_report_is_markdown_without_anything_of_a_model_or_of_a_kind_in_it(compared, out):
    page = (out / "report.md").read_text()
    assert "script" not in page and "\x1b" not in page and "\u202e" not in page and "Spielberg" not in page
    assert "](http" not in page and "<b>" not in page
    assert "LasJ" not in page and "Judged" not in page and "Out of form" not in page
    assert r"\| \[x\]\(http\:\/\/evil\) \<b\>" in page
    tables = [block.split("\n") for block in page.split("\n\n") if block.startswith("|")]
    assert len(tables) == 5  # policies, results, differences, kinds, failures
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table if line}) == 1


def test_the_report_is_a_function_of_metrics_json_alone(compared, out, tmp_path):
    (tmp_path / "again").mkdir()
    written = write_report(json.loads((out / "metrics.json").read_text()), tmp_path / "again")
    assert [path.name for path in written] == ["report.md", "sweeps.svg", "sweeps.png"]
    for path in written:
        assert path.read_bytes() == (out / path.relative_to(tmp_path / "again")).read_bytes()


def test_sweeps_are_drawn_as_one_line_a_policy_and_single_settings_are_not(compared, out, tmp_path):
    picture = (out / "plots/sweeps.svg").read_text()
    for text in ("EM over step limit", "EM over passages per search", "direct", "searcher"):
        assert f">{text}</text>" in picture
    assert "EM over temperature" not in picture
    shutil.copytree(out, tmp_path / "copy")
    evaluate(toys(out.parent / "toy.jsonl", "direct"), tmp_path / "copy")
    assert not list((tmp_path / "copy/plots").iterdir())


def test_a_policy_with_a_top_k_of_its_own_is_compared_at_its_own(tmp_path):
    out = tmp_path / "out"
    questions = write_questions(tmp_path / "toy.jsonl")
    configs = toys(questions, "direct") | toys(questions, "searcher", retrieval__top_k=1)
    figures = evaluate(configs, out)
    assert {(r["setting"], r["baseline_setting"]) for r in figures["differences"]} == {("t1_s8_k1", "t1_s8_k3")}
    assert "| searcher | t1_s8_k1 | direct at t1_s8_k3 | 12 |" in (out / "report.md").read_text()


def test_an_evaluation_without_a_single_score_still_reports(tmp_path):
    out = tmp_path / "out"
    RECORD.fails = set(range(12))
    figures = evaluate(toys(write_questions(tmp_path / "toy.jsonl"), "direct", "searcher"), out)
    assert {figures[metric] for metric in METRICS} == {None}
    assert {row["n"] for row in figures["differences"]} == {0}
    assert "unknown" in (out / "report.md").read_text()
    assert not list((out / "plots").glob("*"))


def test_a_difference_over_a_few_questions_is_not_marked(compared, tmp_path):
    few = {**compared, "differences": [{**row, "n": 3} for row in compared["differences"]]}
    write_report(few, tmp_path)
    assert re.findall(r"\*\*[+-]?[\d.]+ \[", (tmp_path / "report.md").read_text()) == []


def test_a_policy_that_is_asked_otherwise_is_told_apart(tmp_path):
    configs = toys(write_questions(tmp_path / "toy.jsonl"), "direct", "searcher")
    other = configs["searcher"].model_copy(
        update={"policy": configs["searcher"].policy.model_copy(update={"max_tokens": 12})}
    )
    figures = evaluate({**configs, "searcher": other}, tmp_path / "out")
    (told,) = figures["asked_differently"]
    usual = configs["direct"].policy.max_tokens
    assert told == f"searcher is prompted differently from direct: max_tokens=12 (direct: {usual})"
    assert told in (tmp_path / "out" / "report.md").read_text().replace("\\", "")


def test_a_metric_is_one_entry_of_the_registry(tmp_path, monkeypatch):
    """Registered here, and in the figures, tables, charts, pages and cards of an evaluation."""
    words = Metric(
        "answer_words",
        "words",
        "words of the answer",
        lambda attempt: len((attempt.trajectory.answer or "").split()),
        shown_in=frozenset({"terminal", "page", "card"}),
    )
    monkeypatch.setitem(REGISTRY, words.name, words)
    out = tmp_path / "out"
    figures = evaluate(toys(write_questions(tmp_path / "toy.jsonl"), "direct", "searcher"), out)
    assert figures["answer_words"]["mean"] == 1.5  # "Steven Spielberg" for one half of the questions, "nobody" else
    assert {row["metric"] for row in figures["differences"]} >= {"answer_words"}
    assert figures["by_kind"]["bridge"]["answer_words"]["n"] == 9
    report = (out / "report.md").read_text()
    assert "- words: words of the answer" in report
    assert "words" in summary_table(figures).columns
    assert "words" in results_table(figures, "card").columns and "words" in differences_table(figures, "card").columns
    assert ">words<" in write_report_pages(out, tmp_path / "pages").read_text()
