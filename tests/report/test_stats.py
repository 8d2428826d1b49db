from __future__ import annotations

import json
from operator import itemgetter

import pytest
from click.testing import CliRunner

from reasonrag.commands import inspect
from reasonrag.core.config import load_config
from reasonrag.pipeline.tables import pairs_of
from reasonrag.report.trees import distribution, stats
from tests.e2e.product import pair_rows, summary, tree_rows


@pytest.fixture(scope="module")
def figures(run):
    return stats(run)


def test_counts_are_those_of_the_tables(run, figures):
    nodes, pairs = tree_rows(run), pair_rows(run)
    assert figures["questions"] == {"total": 16, "finished": 16, "failed": {}, "by_dataset": {"sea": 16}}
    assert figures["trees"] == summary(run)["trees"] and figures["trees"]["nodes"] == len(nodes)
    assert figures["distributions"]["steps"]["count"] == sum(row["f1"] is not None for row in nodes)
    assert figures["pairs"]["total"] == len(pairs) > 0
    assert figures["pairs"]["contradictory"] == {"same_text": 0, "same_content": 0, "named": []}
    assert figures["distributions"]["confidence"] == pytest.approx(distribution([row["confidence"] for row in pairs]))
    sides = [[(row[f"{side}_rollouts"], row[f"{side}_type"]) for side in ("chosen", "rejected")] for row in pairs]
    assert figures["pairs"]["on_one_trajectory"] == sum(
        any(count == 1 and type != "answer" for count, type in both) for both in sides
    )
    flat = load_config(file=run / "config.yaml")
    flat = flat.model_copy(update={"pairs": flat.pairs.model_copy(update={"alpha": 1.0, "min_margin": 1e-9})})
    named = itemgetter("question_id", "chosen_node_id", "rejected_node_id")
    left = {named(pair) for pair in pairs_of(nodes, flat, policy="p", config_hash="c")}
    assert figures["pairs"]["by_length_alone"] == sum(named(row) not in left for row in pairs) > 0
    assert figures["pairs"]["questions"] == {"sea": len({row["question_id"] for row in pairs})}


def test_rounds_to_an_answer_are_its_searches_and_the_answer_itself(run, figures):
    nodes = {(row["question_id"], row["node_id"]): row for row in tree_rows(run)}

    def searches(row):
        above = nodes.get((row["question_id"], row["parent_id"]))
        return (row["action"] == "query") + (searches(above) if above else 0)

    rounds = [searches(row) + 1 for row in nodes.values() if row["f1"] is not None]
    assert figures["distributions"]["rounds"] == distribution(rounds)
    assert min(rounds) < max(rounds)


def test_nothing_is_spread_over_nothing():
    assert distribution([]) is None
    assert distribution([3]) == {"count": 1, "mean": 3} | dict.fromkeys(
        ("min", "p25", "median", "p75", "p95", "max"), 3
    )


def test_the_command_prints_tables_or_the_metrics_as_json(run, figures):
    shown = [CliRunner().invoke(inspect.show, [str(run), *flags]).stdout for flags in (("--json",), ())]
    assert json.loads(shown[0]) == figures
    assert "type: query" in shown[1] and "rounds" in shown[1] and str(figures["trees"]["nodes"]) in shown[1]
