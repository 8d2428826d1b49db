"""What makes two runs the same run: rows depend on the seed and the settings, on nothing else."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from reasonrag.storage.folder import Folder
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World
from tests.fakes.stubs import StubRetriever, hit
from tests.faults.matrix import Figure

SETTINGS = ("--policy", "extractive", "--iterations", "12", "--seed", "7")


@pytest.fixture
def own_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "own"))


def refusal(*args: str | Path) -> str:
    """The one line with which `build-tree` refuses."""
    done = product.run("build-tree", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(("hash_seed", "concurrency"), [("0", "1"), ("4242", "64")])
def test_hash_seed_and_concurrency_change_no_row(
    hash_seed: str, concurrency: str, world: World, finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    product.build(*world.flags, *SETTINGS, "--concurrency", concurrency, "--out", out, PYTHONHASHSEED=hash_seed)
    assert product.tree_rows(out) == product.tree_rows(finished_run)
    assert product.pair_rows(out) == product.pair_rows(finished_run)
    assert product.file_digests(out) == product.file_digests(finished_run)


def test_another_seed_changes_rows(world: World, finished_run: Path, tmp_path: Path) -> None:
    product.build(*world.flags, *SETTINGS, "--seed", "8", "--out", tmp_path / "run")
    assert product.tree_rows(tmp_path / "run") != product.tree_rows(finished_run)


@pytest.mark.fault("31", "a setting that changes results differs between runs", "refused with both values")
def test_another_budget_in_the_same_folder_is_refused_with_both_values(
    world: World, own_run: Path, figure: Figure
) -> None:
    before = product.file_digests(own_run)
    line = refusal(*world.flags, *SETTINGS, "--iterations", "13", "--out", own_run)
    figure(line[line.index("(") : line.index(")") + 1])
    assert "search.iterations: 12 there, 13 now" in line
    assert product.file_digests(own_run) == before


@pytest.mark.fault("31", "a setting that changes no result differs between runs", "accepted; the same files")
def test_another_concurrency_is_accepted(world: World, own_run: Path, figure: Figure) -> None:
    before = product.file_digests(own_run)
    product.build(*world.flags, *SETTINGS, "--concurrency", "2", "--out", own_run)
    after = product.file_digests(own_run)
    figure(f"{sum(after[name] == digest for name, digest in before.items())} of {len(before)} files equal")
    assert after == before


def check_narrowed(before: list[product.Row], after: list[product.Row]) -> None:
    """Of duplicates the first one above the margin is kept, so a wider margin may bring another copy to light."""
    assert 0 < len(after) < len(before)
    assert all(row["margin"] >= 0.2 - 1e-9 for row in after)


def test_pairs_are_derived_anew_without_a_call(world: World, own_run: Path) -> None:
    before = product.pair_rows(own_run)
    calls = product.summary(own_run)["calls"]
    done = product.run("pairs", own_run, "--min-margin", "0.2")
    assert done.returncode == 0, done.stderr
    check_narrowed(before, product.pair_rows(own_run))
    assert product.summary(own_run)["calls"] == calls
    assert product.summary(own_run)["pairs"]["min_margin"] == 0.2


def test_a_finished_run_is_run_again_without_a_call(world: World, tmp_path: Path) -> None:
    with ExtractiveServer() as server:
        args = (*world.flags, *server.flags, "--iterations", "4", "--limit", "4", "--out", tmp_path / "run")
        product.build(*args)
        paid, before = len(server.requests), product.file_digests(tmp_path / "run")
        product.build(*args)
        assert len(server.requests) == paid
    assert product.file_digests(tmp_path / "run") == before


@pytest.mark.parametrize("command", ["build-tree", "eval"])
def test_another_model_behind_the_name_of_a_server_is_another_run(command: str, world: World, tmp_path: Path) -> None:
    model = tmp_path / "merged"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with ExtractiveServer(root=str(model)) as server:
        more = ("--iterations", "4") if command == "build-tree" else ("--temperature", "0")
        policy = server.flags if command == "build-tree" else ("--policy", f"p={server.base_url}#extractor")
        args = (command, *world.flags, *policy, *more, "--limit", "2", "--out", tmp_path / "run")
        first, again = product.run(*args), product.run(*args)
        assert (first.returncode, again.returncode, again.stderr.count("calls (")) == (0, 0, 0), first.stderr
        (model / "config.json").write_text('{"trained": "again"}')
        changed = product.run(*args)
    assert changed.returncode == 2 and "behind the name extractor, which is now merged@" in changed.stderr


def test_a_run_that_goes_on_with_another_corpus_behind_its_retriever_says_so(world: World, tmp_path: Path) -> None:
    args = ("--dataset", world.questions, *SETTINGS, "--limit", "2", "--out", tmp_path / "run")
    told = []
    for corpus in ("a", "a", "b"):
        with StubRetriever(results=lambda query, top_k, corpus=corpus: [hit(corpus)] * top_k) as server:
            (tmp_path / "run" / ".finished").unlink(missing_ok=True)
            done = product.run("build-tree", *args, "--retriever-url", server.url)
        assert done.returncode == 0, done.stderr
        told.append("finds other passages than when" in done.stderr)
    assert told == [False, False, True]


def flip(journal: Path, places: Iterable[int]) -> None:
    """Flip one bit of the byte at each place."""
    raw = bytearray(journal.read_bytes())
    for at in places:
        raw[at] ^= 0x10
    journal.write_bytes(bytes(raw))


def test_a_flipped_bit_in_a_kept_tree_is_noticed_and_the_tree_built_again(
    world: World, finished_run: Path, own_run: Path
) -> None:
    journal = own_run / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(journal)) as database:
        (tree,) = database.execute("SELECT rows FROM trees LIMIT 1 OFFSET 3").fetchone()
    flip(journal, [journal.read_bytes().index(tree[:64]) + 32])
    done = product.build(*world.flags, *SETTINGS, "--out", own_run)
    assert "a tree in the journal is damaged; it is built again" in done.stderr
    assert ", 0 calls" in done.stderr, "its replies are kept"
    assert product.file_digests(own_run) == product.file_digests(finished_run)


@pytest.mark.parametrize("within", [b'"finish_reason"', b"the next query is"])
def test_a_flipped_bit_in_a_kept_reply_is_noticed_and_the_reply_asked_for_again(
    within: bytes, world: World, finished_run: Path, own_run: Path
) -> None:
    journal = own_run / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(journal)) as database:
        database.execute("DELETE FROM trees")  # so that every reply is needed again
        database.commit()
    flip(journal, [journal.read_bytes().index(within)])
    done = product.build(*world.flags, *SETTINGS, "--out", own_run)
    assert "a reply in the journal is damaged; its call is made again" in done.stderr
    assert ", 1 calls" in done.stderr
    assert product.file_digests(own_run) == product.file_digests(finished_run)


def test_pairs_of_a_run_without_its_trees_are_refused_and_the_old_ones_stay(own_run: Path) -> None:
    shutil.rmtree(own_run / "trees")
    before = product.pair_rows(own_run)
    done = product.run("pairs", own_run)
    assert done.returncode == 2 and "trees" not in done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert product.pair_rows(own_run) == before != []


def test_unsure_pairs_are_left_out_and_counted(own_run: Path, tmp_path: Path) -> None:
    done = product.run("pairs", own_run, "--min-confidence", "0.6", "--out", tmp_path / "sure")
    assert done.returncode == 0, done.stderr
    kept = {row["pair_id"] for row in product.pair_rows(tmp_path / "sure")}
    counts = product.summary(tmp_path / "sure")["pairs"]
    surest = product.pair_rows(own_run)
    assert 0 < len(surest) < len(kept) == counts["total"]
    assert {row["pair_id"] for row in surest} <= kept and all(row["confidence"] >= 0.8 for row in surest)
    unsure = counts["left_out"]["low confidence"]
    assert f"left out: low confidence {unsure}" in " ".join(done.stdout.replace("│", "").split())
    checked = product.run("verify", tmp_path / "sure")  # a run to every command
    assert checked.returncode == 0 and checked.stdout.count("ok: ") == 11, checked.stdout
    assert product.tree_rows(tmp_path / "sure") == product.tree_rows(own_run)
    Folder(tmp_path / "sure", "run", record="identity.json").note(identity={"seed": 99})
    other = product.run("pairs", own_run, "--out", tmp_path / "sure")
    assert other.returncode == 2 and "holds a different run" in other.stderr and "seed: 99 there" in other.stderr
    refused = product.run("pairs", own_run, "--min-confidence", "1.5", "--out", tmp_path / "no")
    assert refused.returncode == 2 and "min_confidence" in refused.stderr


def test_pairs_never_take_a_folder_of_something_else(own_run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train-mine.parquet").write_text("x")
    for out in (mine, own_run, own_run / "pairs", own_run / "new"):
        done = product.run("pairs", own_run, "--out", out)
        assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert (mine / "train-mine.parquet").read_text() == "x"
    assert not (own_run / "new").exists()


def test_what_pairs_compared_before_does_not_stick(own_run: Path, tmp_path: Path) -> None:
    before = product.pair_rows(own_run)
    assert product.run("pairs", own_run, "--alpha", "1").returncode == 0
    assert product.summary(own_run)["pairs"]["alpha"] == 1
    assert product.run("pairs", own_run, "--level", "trajectory", "--out", tmp_path / "outcome").returncode == 0
    assert product.run("pairs", own_run).returncode == 0
    assert product.pair_rows(own_run) == before
