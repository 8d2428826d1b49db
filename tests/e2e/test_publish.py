"""`reasonrag publish` from the command line to what `load_dataset` reads, on a Hub of its own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.tables import pair_schema, tree_schema
from tests import warmed
from tests.e2e import product
from tests.fakes.hub import serving_hub
from tests.fakes.hub_state import TOKEN, USER, FakeHub
from tests.faults.matrix import Figure, Rounds
from tests.publish.toys import write_policy

ID = f"{USER}/sea-steps"
PARTS = {"pairs": ("train", "test"), "trees": ("nodes",)}
# Exits with an error where a row differs from what the run's own tables hold.
READ_BACK = f"""
import sys
from pathlib import Path
from datasets import load_dataset
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema

run = Path(sys.argv[1])
for config, splits in {PARTS!r}.items():
    found = load_dataset({ID!r}, config, revision="v1.0.0")
    assert set(found) == set(splits), found
    for split, rows in found.items():
        mine = ("trees", tree_schema()) if config == "trees" else ("pairs", pair_schema())
        expected = list(read_shards(run / mine[0], split, mine[1]))
        assert list(rows) == expected, (config, split)
assert set(load_dataset({ID!r}, revision="v1.0.0")) == set({PARTS["pairs"]!r})
"""


@pytest.fixture(scope="module")
def serving() -> Iterator[FakeHub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def hub(serving: FakeHub) -> FakeHub:
    """As it is, with an empty log."""
    serving.clear()
    return serving


@pytest.fixture(scope="module")
def online(serving: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a client of this Hub alone."""
    return {
        **{"HF_ENDPOINT": serving.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
        **{"HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_DISABLE_TELEMETRY": "1"},
    }


@pytest.fixture(scope="module")
def published(finished_run: Path, online: dict[str, str]) -> str:
    """What was said while the run was published at v1.0.0."""
    done = product.run("publish", finished_run, "--repo-id", ID, **online)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_python(code: str, *arguments: str | Path, **env: str) -> None:
    """Run code in a process of its own, which has to succeed."""
    done = warmed.run(warmed.source, code, *map(str, arguments), environment=product.environment(**env))
    assert done.returncode == 0, done.stderr


def planted(run: Path, out: Path, text: str) -> Path:
    """A copy of a run in which the policy once wrote `text`."""
    shutil.copytree(run, out)
    table = out / "trees/nodes-00000-of-00001.parquet"
    rows = read_parquet(table, tree_schema())
    rows[2]["text"] += text
    write_parquet(table, rows, tree_schema())
    return out


def test_what_is_published_is_read_back_and_a_second_time_keeps_what_others_wrote(
    finished_run: Path, published: str, hub: FakeHub, online: dict[str, str]
) -> None:
    assert published.endswith(f"{hub.url}/datasets/{ID}, v1.0.0, private\n")
    repo = hub.repos["datasets", ID]
    assert repo.private
    there = repo.at("v1.0.0").files
    assert sorted(there) == [
        *(".gitattributes", "README.md", "config.yaml"),
        *(f"pairs/{split}-00000-of-00001.parquet" for split in ("test", "train")),
        *("reasonrag.yaml", "run.json", "trees/nodes-00000-of-00001.parquet"),
    ]
    mine = {path.name: path.read_bytes() for path in finished_run.rglob("*.parquet")}
    assert {Path(name).name: blob.content for name, blob in there.items() if name.endswith(".parquet")} == mine
    assert not [path for path in finished_run.parent.iterdir() if path != finished_run]

    in_python(READ_BACK, finished_run, **online)

    card = there["README.md"].content.decode().replace("tags:\n", "tags:\n- by-hand\n") + "\nWords by hand.\n"
    repo.edit("README.md", card.encode())
    again = product.run("publish", finished_run, "--repo-id", ID, "--license", "cc-by-4.0", **online)
    assert again.returncode == 0, again.stderr
    assert "v1.1.0, private" in again.stdout
    files = repo.commits[-1].files
    merged = DatasetCard(files["README.md"].content.decode())
    assert merged.text.endswith("\nWords by hand.\n")
    data = merged.data.to_dict()
    assert data["tags"][0] == "by-hand" and data["license"] == "cc-by-4.0"
    assert [config["config_name"] for config in data["configs"]] == ["pairs", "trees"]


def test_ctrl_c_leaves_no_staged_folder_and_the_printed_command_goes_on(
    finished_run: Path, tmp_path: Path, hub: FakeHub, online: dict[str, str]
) -> None:
    run, name = tmp_path / "run", f"{USER}/stopped"
    shutil.copytree(finished_run, run)
    hub.fail("commit", do=lambda: child.send_signal(signal.SIGINT), status=503)
    child = product.start("publish", run, "--repo-id", name, **online)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.endswith(f"Resume with:\n  reasonrag publish {run} --repo-id {name}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not hub.repos["datasets", name].written


def test_a_policy_trained_on_a_published_version_is_asked_as_that_run_asked(
    published: str, tmp_path: Path, hub: FakeHub, online: dict[str, str]
) -> None:
    trained = product.run(
        *("dpo", "train", "--data", f"{ID}@v1.0.0:pairs", "--model", "demo", "--set", "max_steps=1", "--set"),
        # The demo policy reads 512 tokens, a little less than the longest of these pairs has.
        *(
            "method=full",
            "--max-dropped",
            "0.02",
            "--batch-size",
            "1",
            "--accumulation",
            "1",
            "--out",
            tmp_path / "policy",
        ),
        **online,
    )
    assert trained.returncode == 0, trained.stderr
    version = hub.repos["datasets", ID].at("v1.0.0")
    assert (tmp_path / "policy/reasonrag.yaml").read_bytes() == version.files["reasonrag.yaml"].content
    # By this the same version, and no other, is found offline (tests/dpo/test_examples.py).
    kept = Path(online["HF_HOME"], "hub", f"datasets--{ID.replace('/', '--')}", "refs/v1.0.0")
    assert kept.read_text() == version.oid


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("hf_" + "bY4" * 11 + "z", "secret hugging_face", ""),
        ("/home/ann/keys.txt", "path /home/ann", "--allow path"),
        ("ann@mail.example.org", "email ann@mail.example.org", "--allow email"),
    ],
)
def test_what_the_policy_should_not_have_written_is_found_and_nothing_is_sent(
    finished_run: Path, tmp_path: Path, hub: FakeHub, online: dict[str, str], text: str, kind: str, shown: str
) -> None:
    run = planted(finished_run, tmp_path / "run", f" {text} ")
    done = product.run("publish", run, "--repo-id", f"{USER}/planted", **online)
    assert done.returncode == 2
    assert f"found: trees/nodes-00000-of-00001.parquet, column text, row 3: {kind}" in done.stdout
    assert "so nothing was sent" in done.stderr and shown in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "secret" not in kind or text not in done.stdout + done.stderr
    assert hub.log == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_dry_run_writes_what_would_go_up_and_sends_nothing(
    finished_run: Path, tmp_path: Path, hub: FakeHub, online: dict[str, str]
) -> None:
    command = ("publish", finished_run, "--repo-id", ID, "--dry-run")
    done = product.run(*command, "--out", tmp_path / "out", **online)
    assert done.returncode == 0, done.stderr
    without_out = product.run(*command, **online)
    assert without_out.stdout == done.stdout.replace(f"{tmp_path / 'out'}/", "")
    assert hub.log == []
    train = "pairs/train-00000-of-00001.parquet"
    size = (finished_run / "pairs/train-00000-of-00001.parquet").stat().st_size
    assert f"{size:,}  {train}\n" in done.stdout
    assert "licence: unknown\n" in done.stdout
    assert "no secrets, machine paths or e-mail addresses" in done.stdout
    assert read_parquet(tmp_path / "out" / train, pair_schema())
    assert DatasetCard.load(tmp_path / "out/README.md").data.to_dict()["license"] == "unknown"


@pytest.mark.fault(
    "A9",
    "SIGKILL of publish --dry-run --out",
    "nothing under the name of --out or all of it, and the same command goes on",
    before="3 of 3 left a partial folder, which the same command refused",
)
def test_a_killed_dry_run_leaves_no_part_of_its_folder(
    finished_run: Path, tmp_path: Path, online: dict[str, str], rounds: Rounds, figure: Figure
) -> None:
    kills, moments = rounds(2, 20), random.Random(7)
    command = ("publish", finished_run, "--repo-id", ID, "--dry-run", "--out")
    assert product.run(*command, tmp_path / "whole", **online).returncode == 0
    whole = tree_bytes(tmp_path / "whole")
    finished = same = 0
    for number in range(kills):
        out = tmp_path / f"{number}/out"
        out.parent.mkdir()
        files = moments.randrange(1, 2 * len(whole))  # each is linked first, then copied
        child = product.start(*command, out, **online)
        while child.poll() is None and sum(len(names) for *_, names in os.walk(out.parent)) < files:
            time.sleep(0.001)
        child.kill()
        child.wait(60.0)
        if out.exists():
            finished += 1
        else:
            assert product.run(*command, out, **online).returncode == 0
            assert [path.name for path in out.parent.iterdir()] == ["out"]
        same += tree_bytes(out) == whole
    figure(f"{same} of {kills} went on to the whole folder; {finished} of them had it already")
    assert same == kills


def tree_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED: dict[str, Callable[[Path, Path], tuple[str | Path, ...]]] = {
    "is not empty": lambda run, tmp: (run, "--repo-id", ID, "--dry-run", "--out", run),
    "give it as --license": lambda run, tmp: (run, "--repo-id", ID, "--public"),
}


@pytest.mark.parametrize("expected", REFUSED)
def test_what_cannot_work_is_one_line(
    finished_run: Path, tmp_path: Path, hub: FakeHub, online: dict[str, str], expected: str
) -> None:
    done = product.run("publish", *REFUSED[expected](finished_run, tmp_path), **online)
    assert (done.returncode, hub.log) == (2, [])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_a_policy_is_published_as_a_model(tmp_path: Path, hub: FakeHub, online: dict[str, str]) -> None:
    path = write_policy(tmp_path / "policy")
    done = product.run(
        *("publish", path, "--repo-id", f"{USER}/policy", "--license", "mit", "--public", "--tag", "v2.0.0"),
        fresh=True,
        **online,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.url}/{USER}/policy, v2.0.0, public\n"
    repo = hub.repos["models", f"{USER}/policy"]
    assert repo.at("v2.0.0").files["model.safetensors"].content == (path / "model.safetensors").read_bytes()
    assert not [name for name in repo.at("v2.0.0").files if name.endswith((".bin", ".pt", ".sqlite"))]
