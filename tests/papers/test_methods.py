"""A policy in several formats: one sweep, the papers' table, and what a search changes."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from papers.methods import SPLIT, methods_table, split_table
from tests.evaluation.test_report import KINDS
from tests.evaluation.test_run import toys
from tests.evaluation.toy_policies import RECORD, evaluate, write_questions
from tools.recompute import of_evaluation

DIRECT, STANDARD = "python:papers.baselines:Direct", "python:papers.baselines:RAG"
PAPERS = Path(__file__).parents[3] / "shared" / "papers"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("methods") / "out"


@pytest.fixture(scope="module")
def questions(out):
    files = [write_questions(out.parent / f"{name}.jsonl") for name in ("hotpotqa", "toy")]
    return ",".join(map(str, files))


@pytest.fixture(scope="module")
def compared(out, questions):
    RECORD.clear()
    (direct,) = toys(questions, "knower", format__name=DIRECT).values()
    (rag,) = toys(questions, "knower", format__name=STANDARD).values()
    return evaluate({"direct": direct, "rag": rag}, out)


def test_the_papers_table_has_a_row_per_set_and_method_with_the_papers_rows_below(compared, out):
    table = methods_table(compared)
    ours = [row for row in table.rows if row[3]]
    assert [row[:4] for row in ours] == [
        [dataset, format, format, "12"] for dataset in ("hotpotqa", "toy") for format in ("direct", "rag")
    ]
    assert table.columns[4:] == ["EM", "F1", "ACC", "searches"]
    assert re.fullmatch(r"0\.667 \[0\.\d+, 0\.\d+\]", ours[1][4]) and ours[1][7] == "1.000 [1.000, 1.000]"
    below = [row for row in table.rows if not row[3]]
    assert {row[0] for row in below} == {"hotpotqa"}
    source = "ReasonRAG, Table 2: Standard RAG, Qwen2.5-7B-Instruct"
    assert ["hotpotqa", "rag", source, "", "0.293", "0.399", "", ""] in below
    assert ["hotpotqa", "rag", "When to search, Table 3: Standard RAG", "", "", "0.150", "0.400", "1.000"] in below


def test_questions_fall_into_four_parts_by_what_a_search_changes(compared, out):
    by_hand = dict.fromkeys(SPLIT, 0)
    for n in range(12):
        place = (n % 2 == 0, n % 3 != 0)
        by_hand[next(part for part, wanted in SPLIT.items() if wanted == place)] += 1
    assert by_hand == {"both": 4, "only with": 4, "only without": 2, "neither": 2}
    table = split_table(out, compared)
    assert [row[0] for row in table.rows] == ["all", *KINDS]
    for row in table.rows:
        shares = [float(cell.split()[0]) for cell in row[2:]]
        assert sum(shares) == pytest.approx(1, abs=2e-3)
        if row[0] == "all":
            assert shares == pytest.approx([by_hand[part] / 12 for part in SPLIT], abs=1e-3)


def test_intervals_of_formats_and_data_sets_can_be_computed_anew(compared, out):
    again = of_evaluation(out)
    assert again.largest < 1e-9
    metrics = sum(isinstance(value, dict) and "mean" in value for value in compared.values())
    assert again.intervals >= metrics * (2 * (1 + len(KINDS) + 2) + 1 + len(KINDS))


def test_a_curve_over_retrievals_pays_for_forced_answers_alone(tmp_path):
    from reasonrag.evaluation.tables import sweep_panels

    questions = write_questions(tmp_path / "toy.jsonl")
    RECORD.clear()
    figures = evaluate(toys(questions, "endless"), tmp_path / "out", max_steps=[9], max_searches=[0, 1, 2, 3])
    made = {name: of["retrievals"]["mean"] for name, of in figures["policies"]["endless"].items()}
    assert made == {"t1_s9_r0_k3": 0, "t1_s9_r1_k3": 1, "t1_s9_r2_k3": 2, "t1_s9_r3_k3": 3}
    assert RECORD.calls == {"endless": 12 * (6 + 4)}  # three searches, each read, and an answer at each limit
    (panel,) = sweep_panels(figures)
    assert panel.x_label == "most retrievals" and list(panel.lines[0].x) == [0, 1, 2, 3]


@pytest.mark.data
@pytest.mark.skipif(not PAPERS.exists(), reason="the papers' texts are not here")
def test_what_the_papers_print_is_what_their_texts_say():
    names = {"ReasonRAG": "reasonrag", "HiPRAG": "hiprag", "Search-P1": "search-p1", "When to search": "when-to-search"}
    texts = {}
    for paper, name in names.items():
        lines = (PAPERS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        texts[paper] = [re.sub(r"</?[a-z]+>|[*$\\]", "", line).split() for line in lines]
    checked = 0
    with (Path(__file__).parents[2] / "papers" / "methods.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            figures = [line[name] for name in list(line)[7:] if line[name]]
            method = line["method"].split()
            of_method = [words for words in texts[line["paper"]] if _holds(words, method)]
            assert any(_in_some_order(figures, words) for words in of_method), line
            checked += len(figures)
    assert checked > 500


def _holds(words, method):
    return any(words[at : at + len(method)] == method for at in range(3))


def _in_some_order(figures, words):
    left = list(words)
    for figure in figures:
        if figure not in left:
            return False
        left.remove(figure)
    return True
