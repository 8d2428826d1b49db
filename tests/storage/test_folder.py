"""What a folder remembers of the work in it."""

from __future__ import annotations

import os

import pytest
from structlog.testing import capture_logs

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.plugins import code_of, import_plugin
from reasonrag.core.settings import identity
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import Folder, finished, mark_finished


def test_other_work_is_refused_by_the_settings_that_differ(tmp_path):
    folder = Folder(tmp_path, "training run", record="identity.json")
    now = identity(load_config(preset="demo"))
    folder.note(identity=now)
    with pytest.raises(RunError, match=r"holds a different training run \(search\.iterations: \d+ there, 99 now\)"):
        folder.check_same(now | {"search.iterations": 99}, Config())


@pytest.mark.parametrize(
    "change",
    ["out/trees/nodes.parquet", "corpus.jsonl", "policy/model.safetensors", "base/a.json", "a/report/b/c/d.txt"],
)
def test_a_finished_command_is_known_until_a_file_that_it_read_or_wrote_is_touched(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    files = ("run.json", "trees/nodes.parquet", "journal.sqlite")
    files = (
        *(f"out/{name}" for name in files),
        "corpus.jsonl",
        "base/a.json",
        "policy/model.bin",
        "a/report/b/c/d.txt",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / name, {})
    write_json(tmp_path / "policy/adapter_config.json", {"base_model_name_or_path": str(tmp_path / "base")})
    config = load_config(
        overrides={"retrieval.corpus": "corpus.jsonl", "policy.spec": "hf:policy", "questions.dataset": "a"}
    )
    mark_finished(out := tmp_path / "out", "build-tree", config)
    (out / "report").mkdir()
    write_json(out / "report/index.json", {})
    (out / "journal.sqlite").touch()
    assert finished(out, "build-tree", config) == out and not finished(out, "eval", config)
    assert not finished(out, "build-tree", load_config(overrides={"retrieval.corpus": "corpus.jsonl"}))
    (path := tmp_path / change).touch()
    os.utime(path, (0, 0))
    mark_finished(out, "build-tree", config)
    path.write_text("[]" * (path.stat().st_size // 2))  # as long as before, and as old
    os.utime(path, (0, 0))
    assert finished(out, "build-tree", config) is None


def test_a_command_with_code_of_others_is_never_taken_as_finished(tmp_path):
    config = load_config(overrides={"policy.spec": "python:mine:policy"})
    mark_finished(tmp_path, config)
    assert finished(tmp_path, config) is None


def test_a_run_that_goes_on_with_other_code_of_a_plug_in_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file, folder, told = tmp_path / "own_worth.py", Folder(tmp_path, "run", record="identity.json"), []
    for code in ("worth = len", "worth = len", "worth = max"):
        file.write_text(code)
        import_plugin("own_worth:worth")
        with capture_logs() as logs:
            folder.keep_served(code_of({"outcome": {"name": "python:own_worth:worth"}, "seed": 1}))
        told.append(len(logs))
    assert told == [0, 0, 1] and "the plug-ins have other code than when" in logs[0]["event"]
    assert code_of({"outcome": {"name": "f1"}}) == {}
