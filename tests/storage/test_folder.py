"""Folders that an earlier version of reasonrag wrote."""

from __future__ import annotations

import json

import pytest

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import dump, identity
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import Folder, finished, mark_finished, read_run


def test_work_of_an_earlier_version_is_refused_by_its_settings(tmp_path):
    folder = Folder(tmp_path, "training run", record="identity.json")
    now = identity(load_config(preset="demo"))
    folder.note(identity=now | {"search.gone": 3})
    with pytest.raises(RunError, match=r"begun by an earlier version of reasonrag, which had search\.gone among its"):
        folder.check_same(now, Config())
    with pytest.raises(RunError, match=r"holds a different training run \(search\.iterations: \d+ there, 99 now\)"):
        Folder(tmp_path / "b", "training run", record="identity.json").note(identity=now)
        Folder(tmp_path / "b", "training run", record="identity.json").check_same(
            now | {"search.iterations": 99}, Config()
        )


def test_a_finished_run_is_read_without_settings_that_are_gone(tmp_path):
    config = load_config(preset="demo", overrides={"search.iterations": 7})
    text = (
        dump(config).replace("search:\n", "search:\n  gone: 3\n").replace("retrieval:\n", "gone: {a: 1}\nretrieval:\n")
    )
    (tmp_path / "config.yaml").write_text(text)
    write_json(tmp_path / "run.json", {"policy": "x"})
    assert read_run(tmp_path) == (config, json.loads((tmp_path / "run.json").read_text()))


@pytest.mark.parametrize(
    "change", ["out/trees/nodes.parquet", "corpus.jsonl", "policy/model.safetensors", "base/a.json"]
)
def test_a_finished_command_is_known_until_a_file_that_it_read_or_wrote_is_touched(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    files = ("run.json", "trees/nodes.parquet", "journal.sqlite")
    files = (*(f"out/{name}" for name in files), "corpus.jsonl", "base/a.json", "policy/model.bin")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / name, {})
    write_json(tmp_path / "policy/adapter_config.json", {"base_model_name_or_path": str(tmp_path / "base")})
    config = load_config(overrides={"retrieval.corpus": "corpus.jsonl", "policy.spec": "hf:policy"})
    mark_finished(out := tmp_path / "out", "build-tree", config)
    (out / "report").mkdir()
    write_json(out / "report/index.json", {})
    (out / "journal.sqlite").touch()
    assert finished(out, "build-tree", config) == out and not finished(out, "eval", config)
    assert not finished(out, "build-tree", load_config(overrides={"retrieval.corpus": "corpus.jsonl"}))
    (tmp_path / change).touch()
    assert finished(out, "build-tree", config) is None


def test_a_command_with_code_of_others_is_never_taken_as_finished(tmp_path):
    config = load_config(overrides={"policy.spec": "python:mine:policy"})
    mark_finished(tmp_path, config)
    assert finished(tmp_path, config) is None
