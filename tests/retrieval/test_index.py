"""Parts of an index are whole or not there, and nothing that was changed is believed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.retrieval.index import Draft, IndexFolder, Manifest, Plan

PLAN = Plan("bm25", {"passages": "abc"}, {"k1": 1.2}, {"bm25s": "1"})


def build(folder: Path, plan: Plan = PLAN, **files: bytes) -> Manifest:
    index = IndexFolder(folder)
    with index.locked():
        draft = Draft(index, plan)
        for name, data in (files or {"a": b"first", "b": b"second"}).items():
            with draft.writing(name) as file:
                file.write(data)
        return draft.finish({"things": 2})


def test_a_finished_part_says_what_it_is_and_forgets_its_scratch(tmp_path: Path) -> None:
    index = IndexFolder(tmp_path)
    draft = Draft(index, PLAN)
    with draft.writing("deep/er/file", scratch=True) as file:
        file.write(b"x")
    with draft.writing("sub/a") as file:
        file.write(b"first")
    assert draft.holds("sub/a") and draft.holds("deep/er/file", scratch=True) and not draft.holds("file")
    made = draft.finish({"things": 1})
    assert index.verify("bm25", fully=True) == made == index.manifest("bm25")
    assert (made.size, made.counts, list(made.files)) == (5, {"things": 1}, ["sub/a"])
    assert index.sound(PLAN) == made and index.sound(Plan("bm25", {"passages": "abd"})) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".verified.json", "a", "bm25", "manifest.json", "sub"]


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "said"), [(delete, "missing"), (truncate, "bytes"), (flip, "checksum")])
def test_damage_is_told_in_one_line(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    build(tmp_path)
    damage(tmp_path / "bm25/b")
    for fully in (False, True):
        with pytest.raises(DataError, match=rf"bm25/b .*{said}") as caught:
            IndexFolder(tmp_path).verify("bm25", fully=fully)
        assert "\n" not in str(caught.value)


def test_damage_that_hides_its_time_is_found_by_a_full_look_and_on_another_machine(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / "bm25/a"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    IndexFolder(tmp_path).verify("bm25")
    with pytest.raises(DataError, match="checksum"):
        IndexFolder(tmp_path).verify("bm25", fully=True)
    (tmp_path / ".verified.json").unlink()
    with pytest.raises(DataError, match="checksum"):
        IndexFolder(tmp_path).verify("bm25")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"layout": 1}', "damaged"),
        ('{"layout": 99}', "layout 99, this version reads 1"),
        ('{"layout": 1, "made_of": {}, "settings": {}, "versions": {}, "counts": {}, "files": {"a": 1}}', "damaged"),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_told_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    build(tmp_path)
    (tmp_path / "bm25/manifest.json").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        IndexFolder(tmp_path).verify("bm25")
    assert "\n" not in str(caught.value)
    assert IndexFolder(tmp_path).sound(PLAN) is None


def test_no_byte_of_a_manifest_can_be_flipped_unseen(tmp_path: Path) -> None:
    made = build(tmp_path)
    path = tmp_path / "bm25/manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert IndexFolder(tmp_path).manifest("bm25") == made  # a blank became another one, at most
        except DataError as error:
            assert "\n" not in str(error)


def test_a_part_that_is_missing_is_named_beside_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not an index, and has no bm25"):
        IndexFolder(tmp_path).need("bm25")
    build(tmp_path)
    Draft(IndexFolder(tmp_path), Plan("vectors", {}))
    with pytest.raises(DataError, match="is an index of bm25, and has no vectors; its build was not finished"):
        IndexFolder(tmp_path).need("vectors")


def test_a_part_over_another_part_than_lies_there_is_refused(tmp_path: Path) -> None:
    under = build(tmp_path, Plan("passages", {"corpus": "c"}))
    over = Plan("bm25", {"passages": under.fingerprint})
    assert build(tmp_path, over) == IndexFolder(tmp_path).verify("bm25")
    build(tmp_path, Plan("passages", {"corpus": "d"}))
    with pytest.raises(DataError, match="bm25 was built over other passages than the folder holds"):
        IndexFolder(tmp_path).verify("bm25")


@pytest.mark.parametrize("moment", ["before the old part is deleted", "before the new part has its name"])
def test_a_kill_between_finishing_and_naming_is_mended_by_the_next_to_build(tmp_path: Path, moment: str) -> None:
    old = build(tmp_path, a=b"old")
    new = build(tmp_path / "elsewhere", Plan("bm25", {"passages": "new"}), a=b"new")
    (tmp_path / "elsewhere/bm25").rename(tmp_path / ".building-bm25")
    (tmp_path / ".building-bm25/scratch").mkdir()
    if moment == "before the new part has its name":
        shutil.rmtree(tmp_path / "bm25")
    else:
        assert IndexFolder(tmp_path).need("bm25") == old
    with IndexFolder(tmp_path).locked():
        assert IndexFolder(tmp_path).verify("bm25", fully=True) == new
    assert not list(tmp_path.glob(".building*"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot hold a search index"), IndexFolder(tmp_path / "file/index").locked():
        pass
