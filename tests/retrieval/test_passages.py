"""What becomes of a corpus's rows: every one is a passage or is reported, and a kill changes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.types import Passage
from reasonrag.retrieval.index import IndexFolder, Manifest, PassagesConfig, Silent
from reasonrag.retrieval.passages import CorpusSource, PassageStore, build_passages, open_corpus, split
from tests.retrieval.forked import forked

STRICT = PassagesConfig(strict=True)
BAD = [
    {"id": "1", "contents": "x"},
    {"id": "2", "contents": " "},
    {"id": "", "contents": "x"},
    {"id": "1", "contents": "y"},
    {"id": "5\x1b[31m\u202e", "title": "only"},
    [],
    {"id": 7, "title": "Pál\ud83d", "text": "z"},
]


class Notes(Silent):
    """Keeps what a build says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(folder: Path, corpus: Path, rules: PassagesConfig = PassagesConfig(), **options: Any) -> Manifest:  # noqa: B008
    index = IndexFolder(folder)
    with index.locked():
        return build_passages(index, open_corpus(str(corpus)), rules, **{"progress": Silent(), **options})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the part, byte for byte."""
    part = folder / "passages"
    return {str(path.relative_to(part)): path.read_bytes() for path in sorted(part.rglob("*")) if path.is_file()}


def test_rows_that_are_no_passage_are_set_aside_by_number_and_reason(tmp_path: Path) -> None:
    notes = Notes()
    manifest = build(tmp_path / "i", write(tmp_path / "c.jsonl", BAD), progress=notes)
    store = PassageStore(IndexFolder(tmp_path / "i"))
    assert [store.passage(row) for row in range(len(store))] == [Passage("1", "x"), Passage("7", "Pál?\nz")]
    lines = (tmp_path / "i/passages/set_aside.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 2, "id": "2", "reason": "contents missing or empty"},
        {"row": 3, "id": "", "reason": "id missing or empty"},
        {"row": 4, "id": "1", "reason": "duplicate id"},
        {"row": 5, "id": "5�[31m�", "reason": "contents missing or empty"},
        {"row": 6, "id": None, "reason": "not a JSON object"},
    ]
    assert manifest.counts == {
        "rows": 7,
        "passages": 2,
        "contents missing or empty": 2,
        "duplicate id": 1,
        "id missing or empty": 1,
        "not a JSON object": 1,
    }
    assert notes.lines[0].startswith("7 rows gave 2 passages. contents missing or empty: 2; duplicate id: 1")


def test_strict_rules_refuse_them_in_one_line_however_often(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", BAD)
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            build(tmp_path / "i", corpus, STRICT)
        message = str(caught.value)
        assert "contents missing or empty in 2 rows (2, 5)" in message
        assert "id missing or empty in 1 row (3)" in message
        assert "duplicate id in 1 row (4 '1')" in message
        assert "not a JSON object in 1 row (6)" in message
        assert "\n" not in message
    assert not (tmp_path / "i/passages").exists()


@pytest.mark.parametrize("rows", [[], BAD[1:3]])
def test_a_corpus_without_passages_is_refused(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(DataError, match="no passages in it"):
        build(tmp_path / "i", write(tmp_path / "c.jsonl", rows))


def test_long_passages_are_split_between_words_and_reported(tmp_path: Path) -> None:
    text = "Title of it\n" + "  ".join(f"w{i}" for i in range(25))
    corpus = write(tmp_path / "c.jsonl", [{"id": "a", "contents": text}, {"id": "a#2", "contents": "x"}])
    build(tmp_path / "i", corpus, PassagesConfig(max_words=10))
    store = PassageStore(IndexFolder(tmp_path / "i"))
    found = [store.passage(row) for row in range(len(store))]
    assert [passage.id for passage in found] == ["a", "a#2", "a#3"]
    assert all(passage.contents.startswith("Title of it\nw") for passage in found)
    assert [word for p in found for word in p.contents.split("\n")[1].split()] == [f"w{i}" for i in range(25)]
    lines = (tmp_path / "i/passages/set_aside.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["longer than 10 words, split", "duplicate id"]


def test_no_piece_of_a_passage_whose_id_came_before_is_taken(tmp_path: Path) -> None:
    first, second = (
        "Title\n" + " ".join(f"{letter}{i}" for i in range(count)) for letter, count in (("a", 12), ("b", 45))
    )
    corpus = write(tmp_path / "c.jsonl", [{"id": "x", "contents": first}, {"id": "x", "contents": second}])
    manifest = build(tmp_path / "i", corpus, PassagesConfig(max_words=10))
    store = PassageStore(IndexFolder(tmp_path / "i"))
    assert [store.passage(row).id for row in range(len(store))] == ["x", "x#2"]
    assert "b0" not in " ".join(store.contents(0, len(store)))
    assert manifest.counts["duplicate id"] == 1


def test_splitting_loses_no_character_of_a_word_and_bounds_texts_without_blanks() -> None:
    assert split("a" * 2500, 10) == ["a" * 1000, "a" * 1000, "a" * 500]
    assert split("\u4e00" * 25, 10) == ["\u4e00" * 10, "\u4e00" * 10, "\u4e00" * 5]
    long_line = " ".join(["x"] * 40)
    assert split(f"{long_line}\ny z", 30) == [" ".join(["x"] * 30), " ".join(["x"] * 10) + "\ny z"]
    assert split("T\n" + "x " * 10, 10) == ["T\n" + "x " * 10]


class Deadly:
    """A corpus that kills its process at one row."""

    def __init__(self, inner: CorpusSource, row: int) -> None:
        self.inner = inner
        self.row = row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rows(self) -> Iterator[tuple[int, Any]]:
        for number, row in self.inner.rows():
            if number == self.row:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, row


def build_until_killed(folder: Path, corpus: Path, row: int) -> None:
    source: Any = Deadly(open_corpus(str(corpus)), row)
    index = IndexFolder(folder)
    with index.locked():
        build_passages(index, source, PassagesConfig(max_words=20), progress=Silent())


def test_a_build_that_was_killed_gives_the_same_bytes_when_it_is_run_again(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows: list[Any] = [{"id": draw.randrange(9000), "contents": "word " * draw.randrange(60)} for _ in range(9000)]
    corpus = write(tmp_path / "c.jsonl", rows)
    build(tmp_path / "whole", corpus, PassagesConfig(max_words=20))
    for row in (500, 3500, 8999):
        assert forked(build_until_killed, tmp_path / "killed", corpus, row) == -signal.SIGKILL
    assert forked(build_until_killed, tmp_path / "killed", corpus, 0) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
