"""A corpus to an index: what is refused before any work, and what may be left after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.retrieval.build import build_index
from reasonrag.retrieval.index import Draft, IndexConfig, IndexFolder, PassagesConfig, Plan, Silent
from reasonrag.retrieval.open import kinds, open_index
from reasonrag.retrieval.passages import build_passages, open_corpus


def corpus(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(texts)))
    return path


def config(path: Path, **more: object) -> IndexConfig:
    return IndexConfig.model_validate({"corpus": str(path), "kind": ["bm25"], "max_memory": "512M", **more})


def test_an_unknown_language_is_refused_before_the_corpus_is_read(tmp_path: Path) -> None:
    asked = config(corpus(tmp_path / "c.jsonl", "one", "two"), bm25={"stemmer": "klingon"})
    with pytest.raises(ConfigError, match="klingon"):
        build_index(tmp_path / "out", asked, replace=False, progress=Silent())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_runs_is_refused_though_it_has_a_lock(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".lock", "journal.sqlite"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(RunError, match="holds other files"):
        build_index(tmp_path / "run", config(corpus(tmp_path / "c.jsonl", "one")), replace=False, progress=Silent())


def test_a_replacement_that_was_killed_behind_the_passages_leaves_no_part_over_the_old_ones(tmp_path: Path) -> None:
    path, out = tmp_path / "c.jsonl", tmp_path / "out"
    build_index(out, config(corpus(path, "one", "two")), replace=False, progress=Silent())
    index = IndexFolder(out)
    corpus(path, "three", "four")
    with index.locked():  # as far as the killed process came
        made_of = {"passages": index.need("passages").fingerprint}
        Draft(index, Plan("embeddings", made_of)).finish({})  # another kind, which the command does not build
        build_passages(index, open_corpus(str(path)), PassagesConfig(), progress=Silent())
    build_index(out, config(path), replace=True, progress=Silent())
    assert kinds(index) == ["bm25"]
    open_index(RetrievalConfig(index=str(out)))
