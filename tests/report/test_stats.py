from __future__ import annotations

import json
from collections import Counter

import pytest
from click.testing import CliRunner

from reasonrag.commands import inspect
from reasonrag.pipeline.tables import distribution
from tests.e2e.product import pair_rows, summary, tree_rows


@pytest.fixture(scope="module")
def figures(run):
    return summary(run)


def test_counts_are_those_of_the_tables(run, figures):
    nodes, pairs = tree_rows(run), pair_rows(run)
    assert figures["questions"] == {"total": 16, "finished": 16, "failed": {}}
    assert figures["trees"]["by_dataset"] == {"sea": 16} and figures["trees"]["nodes"] == len(nodes)
    assert figures["pairs"]["total"] == len(pairs) > 0
    confidences = distribution(Counter(row["confidence"] for row in pairs))
    assert figures["pairs"]["distributions"]["confidence"] == pytest.approx(confidences, abs=1e-4)
    assert figures["pairs"]["by_dataset"] == {"sea": len({row["question_id"] for row in pairs})}


def test_rounds_to_an_answer_are_its_searches_and_the_answer_itself(run, figures):
    nodes = {(row["question_id"], row["node_id"]): row for row in tree_rows(run)}

    def searches(row):
        above = nodes.get((row["question_id"], row["parent_id"]))
        return (row["action"] == "query") + (searches(above) if above else 0)

    rounds = [searches(row) + 1 for row in nodes.values() if row["f1"] is not None]
    assert figures["trees"]["distributions"]["rounds"] == distribution(Counter(rounds))
    assert min(rounds) < max(rounds)


def test_the_command_prints_tables_or_the_metrics_as_json(run, figures):
    shown = [CliRunner().invoke(inspect.show, [str(run), *flags]).stdout for flags in (("--json",), ())]
    assert json.loads(shown[0]) == figures
    assert "type: query" in shown[1] and "rounds" in shown[1] and str(figures["trees"]["nodes"]) in shown[1]
