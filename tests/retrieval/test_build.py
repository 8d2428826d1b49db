"""A corpus to an index: what is refused before any work, and what may be left after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.retrieval.build import build_index
from reasonrag.retrieval.index import IndexConfig, Silent


def corpus(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(texts)))
    return path


def config(path: Path, **more: object) -> IndexConfig:
    return IndexConfig.model_validate({"corpus": str(path), "kind": ["bm25"], "max_memory": "512M", **more})


def test_an_unknown_language_is_refused_before_the_corpus_is_read(tmp_path: Path) -> None:
    asked = config(corpus(tmp_path / "c.jsonl", "one", "two"), bm25={"stemmer": "klingon"})
    with pytest.raises(ConfigError, match="klingon"):
        build_index(tmp_path / "out", asked, progress=Silent())
    assert not (tmp_path / "out").exists()


def test_other_rules_for_passages_that_are_there_are_refused(tmp_path: Path) -> None:
    build_index(tmp_path / "out", config(corpus(tmp_path / "c.jsonl", "one", "two")), progress=Silent())
    again = {"kind": ["bm25"], "max_memory": "512M"}
    with pytest.raises(ConfigError, match=r"holds passages of other rules \({'chunk_words': 10} now\)"):
        asked = IndexConfig.model_validate(again | {"passages": {"chunk_words": 10}})
        build_index(tmp_path / "out", asked, progress=Silent())
    same = IndexConfig.model_validate(again | {"passages": {"max_words": 1000}})
    assert build_index(tmp_path / "out", same, progress=Silent()).keys() == {"passages", "bm25"}


def test_a_folder_that_is_a_runs_is_refused_though_it_has_a_lock(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".lock", "journal.sqlite"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(RunError, match="holds other files"):
        build_index(tmp_path / "run", config(corpus(tmp_path / "c.jsonl", "one")), progress=Silent())


def test_a_memory_bound_that_no_build_can_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_memory"):
        config(tmp_path / "c.jsonl", max_memory="1K")
