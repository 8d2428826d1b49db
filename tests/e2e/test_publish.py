"""`reasonrag publish` from the command line to what `load_dataset` reads, on a Hub of its own."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.tables import tree_schema
from tests import warmed
from tests.e2e import product
from tests.fakes.hub import serving_hub
from tests.fakes.hub_state import TOKEN, USER, FakeHub
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
    assert re.search(r"\| median margin \| 0?\.\d+ \|", merged.text)
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
        *("dpo", "train", "--data", f"{ID}@v1.0.0:pairs", "--model", "demo", "--out", tmp_path / "policy"),
        *("--set", "max_steps=1", "--set", "method=full", "--batch-size", "1", "--accumulation", "1"),
        # The demo policy reads 512 tokens, a little less than the longest of these pairs has.
        *("--max-dropped", "0.02", "--min-examples", "1", "--min-questions", "1"),
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


def test_a_dry_run_lists_what_would_go_up_and_sends_nothing(
    finished_run: Path, hub: FakeHub, online: dict[str, str]
) -> None:
    done = product.run("publish", finished_run, "--repo-id", ID, "--dry-run", **online)
    assert done.returncode == 0, done.stderr
    assert hub.log == []
    train = "pairs/train-00000-of-00001.parquet"
    assert f"{(finished_run / train).stat().st_size:,}  {train}\n" in done.stdout
    assert "licence: unknown\n" in done.stdout
    assert "no secrets, machine paths or e-mail addresses" in done.stdout


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
