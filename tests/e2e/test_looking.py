"""Looking before paying: `--dry-run`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import yaml

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World


def test_a_dry_run_prints_settings_and_an_estimate_and_calls_nothing(world: World, tmp_path: Path) -> None:
    with ExtractiveServer() as server:
        done = product.run(
            *("build-tree", *world.flags, *server.flags, "--iterations", "12", "--input-price", "1"),
            *("--output-price", "2", "--out", tmp_path / "run", "--dry-run"),
        )
        assert not server.requests
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists()
    settings, estimate = done.stdout.split("16 questions; ")
    assert yaml.safe_load(settings)["search"]["iterations"] == 12
    assert "policy cost at most" in estimate


def test_the_estimate_of_calls_is_an_upper_bound(world: World, finished_run: Path) -> None:
    done = product.run("build-tree", *world.flags, "--policy", "extractive", "--iterations", "12", "--dry-run")
    bound = re.search(r"at most (\d+) policy calls and 0 judge calls; early", done.stdout)
    assert bound is not None
    assert 0 < product.summary(finished_run)["calls"]["policy"]["calls"] <= int(bound[1])


def test_show_without_a_question_shows_the_first_tree(finished_run: Path) -> None:
    assert product.run("show", finished_run).stdout.count("calls")
    first = next(iter(product.tree_rows(finished_run)))["question_id"]
    alone, named = (product.run("show", finished_run, *question, "--best") for question in ((), (first,)))
    assert alone.returncode == 0 and alone.stdout == named.stdout
    tree = json.loads(product.run("show", finished_run, first, "--json").stdout)
    assert {row["question_id"] for row in tree["nodes"] + tree["pairs"]} == {first}
    assert product.run("show", finished_run, first, "--json", "--best").returncode == 2
    assert "the picture is SVG" in product.run("show", finished_run, "--out", "tree.png").stderr


def test_a_picture_and_plans_are_written_over_their_own_kind_alone(finished_run: Path, tmp_path: Path) -> None:
    picture, own = tmp_path / "tree.svg", tmp_path / "questions.jsonl"
    own.write_text('{"question": "Who?"}\n')
    for _ in range(2):
        assert product.run("show", finished_run, "--best", "--out", picture).returncode == 0
    plan = ("rl", "plan", "--preset", "demo", "--limit", "1", "--policy", "demo:search_p1", "--judge", "demo-judge")
    for words in (("show", finished_run, "--best"), plan):
        done = product.run(*words, "--out", own)
        assert done.returncode == 2 and str(own) in done.stderr.splitlines()[-1]
    assert own.read_text() == '{"question": "Who?"}\n'


def test_a_tilde_that_the_shell_left_is_the_home_of_the_user(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    done = product.run("pairs", "~/run", "--min-margin", "0.2", "--out=~/narrow", HOME=str(tmp_path))
    assert done.returncode == 0 and (tmp_path / "narrow" / "pairs").is_dir() and not Path("~").exists()
    asked = ("--dataset=~/none.jsonl", "--policy", "extractive")
    assert f"{tmp_path}/none.jsonl: file not found" in product.run("build-tree", *asked, HOME=str(tmp_path)).stderr
