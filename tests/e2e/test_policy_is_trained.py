"""From trees to a trained policy to a report, by the commands that a user types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reasonrag.storage.parquet import read_parquet
from reasonrag.storage.tables import trajectory_schema
from tests.e2e import product

pytestmark = pytest.mark.slow
run = product.run
SHORT = ("--set", "max_steps=2", "--batch-size", "4")


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo policy: ten questions, some dozen pairs. Read only."""
    out = tmp_path_factory.mktemp("trained") / "trees"
    product.build("--preset", "demo", "--limit", "10", "--seed", "3", "--out", out)
    return out


@pytest.fixture(scope="module")
def trained(trees: Path) -> Path:
    """A policy after two optimizer steps on them. Read only."""
    out = trees.parent / "dpo"
    done = run("dpo", "train", "--preset", "demo", "--data", trees, *SHORT, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_training_says_what_it_reads_and_leaves_a_policy_with_its_curves(trees: Path, trained: Path) -> None:
    summary = read(trained / "training.json")
    assert (summary["stage"], summary["steps"]) == ("dpo", 2)
    assert summary["data"]["train"]["pairs"] == product.summary(trees)["pairs"]["train"]
    assert {p.name for p in trained.iterdir()} >= {
        *("model.safetensors", "config.json", "tokenizer.json", "reasonrag.yaml", "curves.svg", "curves.png")
    }


def test_a_trained_policy_is_asked_as_it_was_trained_without_a_preset(trained: Path, tmp_path: Path) -> None:
    done = run(*("eval", "--dataset", "demo", "--limit", "4", "--policy", f"hf:{trained}", "--out", tmp_path / "eval"))
    assert done.returncode == 0, done.stderr
    figures = read(tmp_path / "eval" / "metrics.json")
    assert (figures["policy"], figures["split"], figures["setting"]) == ("dpo", "test", "t0_s8_k1")
    (file,) = (tmp_path / "eval" / "dpo" / "trajectories").glob("*.parquet")
    rows = read_parquet(file, trajectory_schema())
    prompts = [step["prompt"][0]["content"] for row in rows for step in row["trajectory"]]
    assert len(rows) == 4 and max(map(len, prompts)) < 100  # the brief prompts
    assert all(len(step["passages"]) <= 1 for row in rows for step in row["trajectory"])


def test_two_policies_give_a_table_paired_differences_and_a_plot(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    command = (
        *("eval", "--preset", "demo", "--limit", "6", "--temperature", "0,1", "--out", out),
        *("--policy", "base=demo", "--policy", f"dpo=hf:{trained}"),
    )
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "base" in done.stdout and "t1_s8_k1" in done.stdout
    figures = read(out / "metrics.json")
    for metric in ("em", "f1", "acc", "retrievals", "steps", "format_rate"):
        assert set(figures[metric]) == {"mean", "low", "high", "n"} and figures[metric]["n"] == 6
    compared = {(d["policy"], d["baseline"], d["setting"]) for d in figures["differences"]}
    assert compared == {("dpo", "base", "t0_s8_k1"), ("dpo", "base", "t1_s8_k1")}
    assert (out / "report.md").read_text().startswith("# Evaluation")
    assert (out / "plots" / "sweeps.svg").stat().st_size > 1000
    calls = figures["calls"]
    again = run(*command)
    assert (again.returncode, again.stdout) == (0, done.stdout) and "calls" not in again.stderr
    assert read(out / "metrics.json")["calls"] == calls
