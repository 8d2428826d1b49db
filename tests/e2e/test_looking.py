"""Looking before paying: `--dry-run` and `--preview`."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World, questions


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


def test_a_preview_prints_one_tree_and_its_calls_are_not_paid_again(world: World, tmp_path: Path) -> None:
    with ExtractiveServer() as server:
        args = (*world.flags, *server.flags, "--iterations", "8", "--out", tmp_path / "run")
        done = product.run("build-tree", *args, "--preview")
        assert done.returncode == 0, done.stderr
        assert questions()[0]["question"] in done.stdout
        assert "SPRE=" in done.stdout
        assert re.search(r"8/8 iterations, 0 failed, \d+ calls \(\S+/s\), \d+ tokens \(\S+/s\)", done.stderr)
        assert not (tmp_path / "run/pairs").exists()
        done = product.run("build-tree", *args, "--max-tokens", "40", "--dry-run")
        assert "and 40 written ones a call" in done.stdout
        assert re.search(rf"time: at most .* at \S+/s, as in {tmp_path}/run$", done.stdout.strip())
        product.build(*args)
        assert server.paid_twice == 0
