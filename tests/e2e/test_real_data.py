"""Real questions and passages, end to end."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from reasonrag.core.text import normalize_answer, token_f1
from tests.e2e import product

DATA = Path(__file__).parents[2].parent / "shared/data"
ITERATIONS = 8
ALPHA = 0.9

pytestmark = [pytest.mark.data, pytest.mark.skipif(not DATA.is_dir(), reason="the shared data set folder is not here")]


@pytest.fixture(scope="module")
def hotpot_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten questions of HotpotQA."""
    folder = tmp_path_factory.mktemp("hotpot")
    product.build(
        *("--dataset", DATA / "questions/hotpotqa.jsonl", "--corpus", DATA / "corpus/hotpotqa.jsonl.gz"),
        *("--policy", "extractive", "--limit", "10", "--iterations", str(ITERATIONS), "--seed", "7"),
        *("--set", f"retrieval.cache={folder / 'cache'}", "--out", folder / "run"),
        *[
            "--pair-rule",
            "siblings",
            "--min-confidence",
            "0",
            "--max-pairs",
            "0",
            "--confirm",
            "0",
            "--path-share",
            "1",
        ],
    )
    return folder / "run"


@pytest.fixture(scope="module")
def trees(hotpot_run: Path) -> dict[str, list[product.Row]]:
    """Rows by question."""
    found: dict[str, list[product.Row]] = defaultdict(list)
    for row in product.tree_rows(hotpot_run):
        found[row["question_id"]].append(row)
    return found


def test_no_question_is_lost(hotpot_run: Path, trees: dict[str, list[product.Row]]) -> None:
    summary = product.summary(hotpot_run)
    print({name: summary[name] for name in ("questions", "trees", "seconds")}, summary["pairs"]["total"], "pairs")
    assert summary["questions"] == {"total": 10, "finished": 10, "failed": {}}
    assert summary["trees"]["nodes"] == sum(map(len, trees.values()))
    assert summary["pairs"]["total"] == len(product.pair_rows(hotpot_run)) > 0
    with (DATA / "questions/hotpotqa.jsonl").open(encoding="utf-8") as lines:
        given = {row["id"]: row for row in map(json.loads, lines)}
    for question_id, rows in trees.items():
        assert rows[0]["question"] == given[question_id]["question"]
        assert rows[0]["golden_answers"] == given[question_id]["golden_answers"]


def test_every_tree_hangs_together(trees: dict[str, list[product.Row]]) -> None:
    for rows in trees.values():
        assert [row["node_id"] for row in rows] == list(range(len(rows)))
        assert rows[0]["parent_id"] == -1 and rows[0]["visits"] == ITERATIONS
        for row in rows[1:]:
            parent = rows[row["parent_id"]]
            assert row["parent_id"] < row["node_id"]
            assert row["depth"] == parent["depth"] + 1
            assert parent["stop_reason"] is None
            assert row["visits"] <= parent["visits"] or row["origin"] == "rollout"
            assert bool(row["passages"]) <= (row["action"] == "query")


def test_spre_is_the_mean_discounted_f1_of_the_answers_below(trees: dict[str, list[product.Row]]) -> None:
    checked = 0
    for rows in trees.values():
        below: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["action"] != "answer":
                continue
            assert row["f1"] == token_f1(row["content"], row["golden_answers"])
            node = row
            while True:
                below[node["node_id"]].append(row["f1"] * ALPHA ** row["depth"])
                if node["parent_id"] < 0:
                    break
                node = rows[node["parent_id"]]
        for row in rows:
            rewards = below[row["node_id"]]
            assert row["spre"] == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
            checked += 1
    assert checked > 200


def rewards_of(rows: list[product.Row]) -> dict[tuple[str, str, str], float]:
    """The mean over all answers below any of the equal steps after a prompt, by prompt, type and content."""
    answers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for row in rows:
        node = row
        while row["action"] == "answer" and node["parent_id"] >= 0:
            answers[step_of(node)].add(row["node_id"])
            node = rows[node["parent_id"]]
    worth = {row["node_id"]: row["f1"] * ALPHA ** row["depth"] for row in rows if row["action"] == "answer"}
    return {step: sum(worth[node] for node in below) / len(below) for step, below in answers.items()}


def step_of(row: product.Row) -> tuple[str, str, str]:
    said = normalize_answer(row["content"]) if row["action"] != "malformed" else ""
    return json.dumps(row["prompt"]), row["action"], said or row["text"].strip()


def test_every_pair_is_of_two_siblings_of_different_worth(
    hotpot_run: Path, trees: dict[str, list[product.Row]]
) -> None:
    for pair in product.pair_rows(hotpot_run):
        rows = trees[pair["question_id"]]
        rewards = rewards_of(rows)
        chosen, rejected = rows[pair["chosen_node_id"]], rows[pair["rejected_node_id"]]
        assert chosen["parent_id"] == rejected["parent_id"] == pair["parent_node_id"]
        assert chosen["prompt"] == rejected["prompt"] == pair["prompt"]
        assert (pair["chosen"], pair["rejected"]) == tuple(
            [{"role": "assistant", "content": row["text"]}] for row in (chosen, rejected)
        )
        assert rewards[step_of(chosen)] - rewards[step_of(rejected)] == pytest.approx(pair["margin"])
        assert pair["margin"] >= 0.01 - 1e-9
        assert chosen["action"] != "malformed"
        assert pair["depth"] == rows[pair["parent_node_id"]]["depth"]


def test_no_pair_is_missing_and_none_contradicts_another(hotpot_run: Path, trees: dict[str, list[product.Row]]) -> None:
    said = []
    for pair in product.pair_rows(hotpot_run):
        nodes = (trees[pair["question_id"]][pair[f"{side}_node_id"]] for side in ("chosen", "rejected"))
        said.append(tuple(map(step_of, nodes)))
    assert len(said) == len(set(said)) and not set(said) & {(rejected, chosen) for chosen, rejected in said}
    expected = set()
    for rows in trees.values():
        rewards = rewards_of(rows)
        for first, second in itertools.permutations(rows[1:], 2):
            steps = step_of(first), step_of(second)
            if first["parent_id"] != second["parent_id"] or not all(step in rewards for step in steps):
                continue
            if rewards[steps[0]] - rewards[steps[1]] >= 0.01 - 1e-9 and first["action"] != "malformed":
                expected.add(steps)
    assert set(said) == expected


def test_both_splits_together_hold_no_question_twice(hotpot_run: Path) -> None:
    sides = [{row["question_id"] for row in product.pair_rows(hotpot_run, split)} for split in ("train", "test")]
    assert not sides[0] & sides[1]
