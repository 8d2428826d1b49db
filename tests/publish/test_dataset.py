"""A run's folder to what goes up of it: which files, which bytes, which card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from datasets import load_dataset
from huggingface_hub import DatasetCard
from markdown_it import MarkdownIt

from reasonrag.core.config import PolicyCard, load_config
from reasonrag.core.errors import ConfigError, DataError, InputError, RunError
from reasonrag.formats import PromptSet, open_format
from reasonrag.publish.publish import PublishOptions, stage, staging_folder
from reasonrag.storage.parquet import read_shards, write_parquet
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema
from tests.publish.toys import edit_json, recount, write_run
from tests.report.hostile import HOSTILE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def staged(run: Path, **wanted: object):
    folder = run.parent / "staged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return stage(run, folder, PublishOptions(repo_id="me/data", **wanted))  # type: ignore[arg-type]


def card_of(found) -> DatasetCard:
    return DatasetCard.load(found.upload.folder / "README.md")


def test_the_very_bytes_of_the_tables_go_up_and_nothing_of_the_journal(run):
    (run / "journal.sqlite").write_bytes(b"every prompt")
    (run / "report").mkdir()
    found = staged(run)
    assert sorted(found.files) == [
        *("README.md", "config.yaml", "pairs/test-00000-of-00001.parquet", "pairs/train-00000-of-00001.parquet"),
        *("reasonrag.yaml", "run.json", "trees/nodes-00000-of-00001.parquet"),
    ]
    for name in ("train", "test"):
        mine = run / f"pairs/{name}-00000-of-00001.parquet"
        assert (found.upload.folder / "pairs" / mine.name).read_bytes() == mine.read_bytes()
    data = card_of(found).data.to_dict()
    assert data["license"] == "apache-2.0"
    assert [config["config_name"] for config in data["configs"] if config.get("default")] == ["pairs"]
    assert card_of(staged(run)).content == card_of(found).content


def test_how_the_policy_was_asked_goes_with_its_steps_unless_nobody_knows_it_any_more(run):
    prompts = run.parent / "mine"
    shutil.copytree(PromptSet.find("default").folder, prompts)
    asking = prompts / "reasonrag/reasoning.txt"
    asking.write_text(asking.read_text() + "Ask /home/ann, she knows.")
    (prompts / "diary.txt").write_text("Nobody's business.")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["format"]["prompts"] = str(prompts)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    asked = open_format(load_config(file=run / "config.yaml")).fingerprint
    edit_json(run / "run.json", lambda summary: summary.update(content={"prompts": asked}))
    found = staged(run)
    assert PolicyCard.read(found.upload.folder).prompts == str(found.upload.folder / "prompts")
    assert [(f.file, f.kind) for f in found.findings] == [("prompts/reasonrag/reasoning.txt", "path")]
    assert "prompts/diary.txt" not in found.files
    assert "`reasonrag.yaml`" in card_of(found).text
    for spoil in (lambda: asking.write_text("Changed since."), lambda: shutil.rmtree(prompts)):
        spoil()
        found = staged(run)
        assert "reasonrag.yaml" not in found.files and "reasonrag.yaml" not in card_of(found).text


def test_a_folder_that_a_killed_process_left_goes_and_two_at_once_are_refused(run):
    left = run.parent / ".run.publish"
    (left / "pairs").mkdir(parents=True)
    with staging_folder(run) as folder:
        assert list(folder.iterdir()) == []
        with pytest.raises(RunError, match="in use by another process"), staging_folder(run):
            pass
        assert folder.is_dir()
    assert not left.exists()


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_load_dataset_reads_the_rows_of_all_sources(tmp_path, level):
    run = write_run(tmp_path / "run", datasets=("hotpotqa", "../a/b") if level == "step" else ("demo",), level=level)
    found = staged(run)
    schema = pair_schema if level == "step" else trajectory_pair_schema
    expected = list(read_shards(run / "pairs", "train", schema()))
    loaded = load_dataset(str(found.upload.folder), cache_dir=str(tmp_path / "cache"))
    assert list(loaded["train"]) == expected != []
    assert [config["config_name"] for config in card_of(found).data.configs] == ["pairs", "trees"]


def test_licences_of_known_sources_are_listed_and_one_that_is_given_is_taken(tmp_path):
    run = write_run(tmp_path / "run", datasets=("hotpotqa", "nq"))
    assert card_of(staged(run, public=True)).data.license == ["cc-by-sa-3.0", "cc-by-sa-4.0"]
    assert card_of(staged(run, licence="CC-BY-SA-4.0")).data.license == "cc-by-sa-4.0"
    assert "| hotpotqa | train | cc-by-sa-4.0 |" in card_of(staged(run)).text
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["questions"]["dataset"] = "data/hotpotqa.jsonl"  # a file may have any name
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert card_of(staged(run)).data.to_dict()["license"] == "unknown"


def test_a_corpus_of_ones_own_has_a_licence_of_its_own(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["retrieval"]["corpus"] = "/home/ann/wiki.jsonl"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    found = staged(run)
    assert found.licence == "unknown"
    assert "/home/ann" not in (found.upload.folder / "config.yaml").read_text()
    assert found.findings == []
    with pytest.raises(ConfigError, match="give it as --license"):
        staged(run, public=True)


def test_hostile_text_is_inert_in_the_card(tmp_path):
    text = HOSTILE + "\n```\n````\n<!-- reasonrag:end -->\n---\n# out\n|a|[x](http://evil.example)"
    found = staged(write_run(tmp_path / "run", datasets=(text,), text=text))
    content = (found.upload.folder / "README.md").read_text(encoding="utf-8")
    assert not any(char in content for char in "\x1b\x07\u202e\u2066\u200b\u2028")
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(card_of(found).text)
    tokens += [child for token in tokens for child in token.children or ()]
    html = [token.content.strip() for token in tokens if token.type.startswith("html")]
    assert [comment[:19] for comment in html] == ["<!-- reasonrag:begi", "<!-- reasonrag:end "]
    assert not {"link_open", "image", "hr"} & {token.type for token in tokens}
    plain = staged(write_run(tmp_path / "plain"))
    headings = [token.type for token in tokens].count("heading_open")
    assert headings == len([line for line in card_of(plain).text.splitlines() if line.startswith(("# ", "## "))])
    assert found.upload.card(content) == content


def one_pair_less(run: Path) -> None:
    edit_json(run / "run.json", lambda summary: summary["pairs"].update(total=1000))


def no_pairs(run: Path) -> None:
    for file in (run / "pairs").glob("*"):
        file.unlink()
    recount(run)


BAD = {
    "neither a finished run": lambda run: (run / "run.json").unlink(),
    "no pairs to publish": no_pairs,
    "pairs.total is 1000": one_pair_less,
    "0 shards found": lambda run: (run / "trees/nodes-00000-of-00001.parquet").unlink(),
    "run.json holds what JSON cannot express": lambda run: edit_json(
        run / "run.json", lambda summary: summary.update(seed=float("nan"))
    ),
    "with a readable run.json": lambda run: (run / "run.json").write_text("[]"),
    "does not name the level of its pairs": lambda run: edit_json(
        run / "run.json", lambda summary: summary.update(pairs=3)
    ),
}


@pytest.mark.parametrize("expected", BAD)
def test_a_run_that_cannot_be_published_is_refused_in_one_line(run, expected):
    BAD[expected](run)
    with pytest.raises(InputError, match=expected) as error:
        staged(run)
    assert "\n" not in str(error.value)


def test_what_was_found_is_refused_unless_it_was_looked_at_and_a_secret_always(tmp_path):
    run = write_run(tmp_path / "run", text="mail ann@example.org or /home/ann/x")
    found = staged(run)
    with pytest.raises(DataError, match=r"nothing was sent; --allow email --allow path"):
        found.check(frozenset())
    found.check(frozenset({"email", "path"}))
    edit_json(run / "run.json", lambda summary: summary.update(policy="hf_" + "abcdEFGH1234" * 3))
    found = staged(run)
    assert {f.file for f in found.findings if f.kind == "secret"} == {"run.json", "README.md"}
    with pytest.raises(DataError, match="secrets are never published"):
        found.check(frozenset({"email", "path"}))
    assert json.loads((found.upload.folder / "run.json").read_text())["policy"]  # what is refused can be looked at


def test_pairs_that_contradict_each_other_are_published_and_counted(tmp_path):
    run = write_run(tmp_path / "run")
    path = run / "pairs/train-00000-of-00001.parquet"
    (run / "pairs/test-00000-of-00001.parquet").unlink()
    rows = pq.read_table(path).to_pylist()
    reverse = {"pair_id": "other"}
    for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
        reverse |= {f"{side}{end}": rows[0][f"{other}{end}"] for end in ("", "_type", "_node_id")}
    rows.insert(1, rows[0] | reverse)  # pairs of a question lie together
    write_parquet(path, rows, pair_schema())
    recount(run)
    found = staged(run)
    assert f"2 of {len(rows)} pairs contradict each other" in found.warning
    assert "| pairs that contradict another pair of the same prompt | 2 |" in card_of(found).text
