"""The papers' rows, as declared, against the papers' own text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reasonrag.reproduce.online import HIPRAG, OUTCOME, SEARCH_P1, WHEN_TO_SEARCH
from reasonrag.reproduce.paper import BASE
from reasonrag.reproduce.reasonrag import REASONRAG

PAPERS = Path(__file__).parents[3] / "shared" / "papers"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not PAPERS.exists(), reason="the papers' texts are not here"),
]


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


@pytest.mark.parametrize("table", HIPRAG.tables, ids=lambda table: table.model)
def test_rows_of_hiprag_are_those_of_its_tables(table):
    model, algorithm = table.model.split(", ")
    metrics = ("acc", "osr", "usr")
    printed = [found for line in lines("hiprag") if (found := cells(line)) and found[0] == model]
    for row in table.rows.values():
        (averages,) = (r[3:] for r in printed if len(r) == 6 and r[1] == algorithm and plain(r[2]) == plain(row.label))
        assert [row.averages[m] for m in metrics] == [float(cell) for cell in averages]
        sets = [r[2:] for r in printed if len(r) == 9 and plain(r[1]) == plain(f"{algorithm} + {row.label}")]
        assert [row.values[m] for m in metrics] == [tuple(map(float, found)) for found in sets]


SECTIONS = {
    "Table 6": ("F.2 Effect of Format Reward", "Table 6:"),
    "Table 8": ("F.4 Detailed Ablation", "Table 8:"),
    "Table 10": ("F.6 Detailed Soft Outcome", "Table 10:"),
}


@pytest.mark.parametrize("table", SEARCH_P1.tables, ids=lambda table: f"{table.source}, {table.model}")
def test_rows_of_search_p1_are_those_of_its_tables(table):
    place = 0 if "7B" in table.model else 1
    section = lines("search-p1", *SECTIONS[table.source])
    for row in table.rows.values():
        printed = numbers([line for line in section if f"{row.label} " in line][place], row.label)
        (values,) = row.values.values()
        assert printed[:7] == values
        assert row.averages in ({}, {"acc": printed[7]})


def test_rows_of_when_to_search_are_those_of_its_table_4():
    (table,) = WHEN_TO_SEARCH.tables
    printed = {found[0]: found[1:] for line in lines("when-to-search", "Settings\tNQ") if (found := cells(line))}
    for row in table.rows.values():
        values = tuple(map(float, printed[row.label]))
        assert (row.values["lasj"], row.values["retrievals"]) == (values[::2], values[1::2])


def test_rows_beside_outcome_rewards_are_those_of_two_papers():
    few, many, prompted = OUTCOME.tables
    printed = {
        found[0]: found[1:]
        for line in lines("reasonrag", "Table 3: Impact", "3.3 Training Efficiency")
        if (found := cells(line))
    }
    table_3 = [row for table in REASONRAG.tables for row in table.rows.values()]
    assert {row.label for row in table_3} == {name for name in printed if name.startswith("ReasonRAG (")} - {
        many.rows["grpo"].label
    }
    for row in (few.rows[BASE], few.rows["grpo"], many.rows["grpo"], *table_3):
        values = tuple(map(float, printed[row.label]))
        assert (*row.values["em"], row.averages["em"]) == values[::2]
        assert (*row.values["f1"], row.averages["f1"]) == values[1::2]
    section = lines("search-p1", "Qwen2.5-7B\nDirect", "Table 1:")
    for row in prompted.rows.values():
        values = numbers(next(line for line in section if line.startswith(row.label)), row.label)
        assert (*row.values["acc"], row.averages["acc"]) == values[:8]


def test_an_average_that_is_printed_lies_within_its_data_sets():
    for paper in (HIPRAG, SEARCH_P1, OUTCOME, REASONRAG):
        for table in paper.tables:
            for row in table.rows.values():
                for metric, average in row.averages.items():
                    assert min(row.values[metric]) <= average <= max(row.values[metric]), (table.model, row.label)
