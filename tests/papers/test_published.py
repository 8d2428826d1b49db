"""The papers' rows, as declared, against the papers' own text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from papers import PAPERS as COMPARISONS

PAPERS = Path(__file__).parents[3] / "shared" / "papers"
REASONRAG, HIPRAG, SEARCH_P1, WHEN_TO_SEARCH = (
    COMPARISONS[name] for name in ("reasonrag", "hiprag", "search-p1", "when-to-search")
)
pytestmark = [pytest.mark.data, pytest.mark.skipif(not PAPERS.exists(), reason="the papers' texts are not here")]


def lines(paper, start="", end=None):
    text = (PAPERS / f"{paper}.txt").read_text(encoding="utf-8")
    text = text[text.index(start) :]
    return (text if end is None else text[: text.index(end)]).splitlines()


def plain(text):
    """Without markup, mathematics or blanks."""
    return re.sub(r"</?[bu]>|[\\$*\s]", "", text)


def cells(line):
    return [re.sub(r"</?[bu]>", "", cell).strip() for cell in line.split("\t") if cell.strip()]


def numbers(line, label):
    """What stands behind the label, of lines whose cells are apart by blanks."""
    return tuple(float(word) for word in line.split(f"{label} ", 1)[1].split())


@pytest.mark.parametrize("table", HIPRAG.tables[:-1], ids=lambda table: table.model)
def test_rows_of_hiprag_are_those_of_its_tables(table):
    model, of_table = table.model.split(", ")
    metrics = ("acc", "osr", "usr")
    printed = [found for line in lines("hiprag") if (found := cells(line)) and found[0] == model]
    for row in table.rows.values():
        algorithm, label = (of_table, row.label) if of_table != "both" else row.label.split(" + ")
        (averages,) = (r[3:] for r in printed if len(r) == 6 and r[1] == algorithm and plain(r[2]) == plain(label))
        assert [row.averages[m] for m in metrics] == [float(cell) for cell in averages]
        sets = [r[2:] for r in printed if len(r) == 9 and plain(r[1]) == plain(f"{algorithm} + {label}")]
        assert [row.values[m] for m in metrics] == [tuple(map(float, found)) for found in sets]


def test_rows_of_hiprag_s_rivals_are_those_of_its_table_1():
    printed = {
        plain(found[0]): found[1:]
        for line in lines("hiprag", "Method\tGeneral QA", "Table 1:")
        if (found := cells(line))
    }
    assert HIPRAG.tables[-1].source == "Table 1"
    for row in HIPRAG.tables[-1].rows.values():
        assert [row.values["acc"]] == [tuple(map(float, printed[plain(row.label)]))]


SECTIONS = {
    "Table 6": ("F.2 Effect of Format Reward", "Table 6:"),
    "Table 8": ("F.4 Detailed Ablation", "Table 8:"),
    "Table 9": ("F.5 Detailed Model", "Llama-3.2-3B-Inst. GRPO"),
    "Table 10": ("F.6 Detailed Soft Outcome", "Table 10:"),
    "Table 11": ("F.7 Detailed Hyperparameter", "Table 11:"),
    "Table 12": ("Table 11: Effect of path", "Table 12:"),
    "Table 13": ("F.8 Detailed LLM Evaluator", "Table 13:"),
}


@pytest.mark.parametrize("table", SEARCH_P1.tables, ids=lambda table: f"{table.source}, {table.model}")
def test_rows_of_search_p1_are_those_of_its_tables(table):
    place = 0 if "7B" in table.model or table.source == "Table 9" else 1
    section = lines("search-p1", *SECTIONS[table.source])
    for row in table.rows.values():
        printed = numbers([line for line in section if f"{row.label} " in line][place], row.label)
        (values,) = row.values.values()
        assert printed[:7] == values
        assert row.averages in ({}, {"acc": printed[7]})


def test_rows_of_when_to_search_are_those_of_its_tables_4_and_2():
    ablations, unified = WHEN_TO_SEARCH.tables
    printed = {found[0]: found[1:] for line in lines("when-to-search", "Settings\tNQ") if (found := cells(line))}
    steps = lines("when-to-search", "Checkpoints\tNQ", "Table 2:")
    printed |= {found[0]: found[1:] for line in reversed(steps) if (found := cells(line))}  # those of 4B come first
    printed[unified.rows["full"].label] = printed["Ours"]
    for row in (*ablations.rows.values(), *unified.rows.values()):
        values = tuple(map(float, printed[row.label]))
        assert (row.values["lasj"], row.values["retrievals"]) == (values[::2], values[1::2])


def test_rows_of_reasonrag_are_those_of_its_table_3():
    printed = {
        found[0]: found[1:]
        for line in lines("reasonrag", "Table 3: Impact", "3.3 Training Efficiency")
        if (found := cells(line))
    }
    (table,) = REASONRAG.tables
    labels = {row.label for row in table.rows.values()}
    assert labels == {name for name in printed if name.startswith("ReasonRAG (")} - {"ReasonRAG (RL-ORL): 10k queries"}
    for row in table.rows.values():
        values = tuple(map(float, printed[row.label]))
        assert (*row.values["em"], row.averages["em"]) == values[::2]
        assert (*row.values["f1"], row.averages["f1"]) == values[1::2]
