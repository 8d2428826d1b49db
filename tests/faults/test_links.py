"""Symbolic links, pipes and devices in folders of others: no command reads, writes or deletes through them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contrib.record import Recorder
from reasonrag.core.config import load_config
from reasonrag.core.errors import RunError
from reasonrag.formats import open_format
from reasonrag.publish.publish import staging_folder
from reasonrag.publish.verify import verify
from reasonrag.retrieval.bm25 import build_bm25
from reasonrag.retrieval.index import BM25Config, IndexFolder, Silent
from reasonrag.storage.folder import read_run
from reasonrag.storage.inputs import CALLS
from tests.e2e import product
from tests.faults.matrix import Figure
from tests.publish.toys import write_run
from tests.retrieval.toys import passages, sentences

UPSTREAM = "http://127.0.0.1:9/v1"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(*words: str | Path) -> None:
    done = product.run(*words)
    if done.returncode == 2 and "Traceback" not in done.stderr:
        raise RunError(done.stderr.strip().rpartition("\n")[2])


class Strange:
    """A folder with a run, a policy, a recording and an index, in which a stranger has put links to `home`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.run, self.policy = folder / "home", write_run(folder / "run"), folder / "policy"
        self.home.mkdir()
        for name in ("00099.html", "app.js", "train-00000-of-00002.parquet", "system.txt"):
            (self.home / name).write_text("private\nlast line")
        self.policy.mkdir()
        (self.policy / "reasonrag.yaml").write_text("format: {prompts: prompts}\n")
        self.recording = folder / "recording"
        self.index = passages(folder / "index", sentences(40))
        with self.index.locked():
            build_bm25(self.index, BM25Config(), progress=Silent())

    def link(self, name: Path, target: str = "") -> None:
        """Put a link to `home`, or to a file there, in the place of a file or a folder."""
        name.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(name) if name.is_dir() else name.unlink(missing_ok=True)
        name.symlink_to(self.home / target)

    def attacks(self) -> Iterator[tuple[Path, str, Callable[[], object]]]:
        """Yield what becomes a link, to what, and a command that meets it."""
        run, prompts = self.run, self.policy / "prompts" / "reasonrag"
        for name in ("report/report.css", "report/list.js", "config.yaml"):
            yield run / name, "app.js", lambda: command("report", run)
        for name in ("report/questions", "report/data", "report"):
            yield run / name, "", lambda: command("report", run)
        yield run / "pairs", "", lambda: command("pairs", run)
        yield run / "pairs" / "note.txt", "system.txt", lambda: command("publish", run, "--repo-id", "a/b", "--dry-run")
        yield run / "trees" / "more", "", lambda: command("export", run, "--to", "jsonl", "--out", run.parent / "out")
        for target in ("system.txt", "not there yet"):
            yield self.recording / CALLS, target, lambda: Recorder(UPSTREAM, self.recording)
        for link in (prompts / "system.txt", prompts, prompts.parent):
            target = "system.txt" if link.suffix else ""
            yield link, target, lambda: load_config(overrides={"policy.card": str(self.policy)})
        yield self.index.path / "bm25" / "more", "", lambda: IndexFolder(self.index.path).verify("bm25")


@pytest.mark.fault(
    "A15",
    "symbolic links out of a run, a report, a policy's prompts, a recording or an index of a stranger",
    "refused in a line that names the link; nothing that it leads to is read, changed or deleted",
    before="overwritten, deleted or cut by report, pairs, record; a file of prompts was read, sent and published",
)
def test_no_command_follows_a_link_out_of_a_folder(tmp_path: Path, figure: Figure) -> None:
    strange, refused = Strange(tmp_path), []
    before = contents(strange.home)
    for link, target, act in strange.attacks():
        strange.link(link, target)
        with pytest.raises(RunError, match=r"is a link that leads out of .*; delete it"):
            act()
        assert contents(strange.home) == before
        link.unlink()
        refused.append(str(link.relative_to(tmp_path)))
    figure(f"all refused: {', '.join(refused)}")


@pytest.mark.fault(
    "A15",
    "a link in the place of the folder in which a run is staged, next to it",
    "it is replaced; nothing that it leads to is deleted",
    before="every folder there was deleted",
)
def test_a_link_next_to_a_run_is_not_staged_into(tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "home" / "documents").mkdir(parents=True)
    (tmp_path / ".run.publish").symlink_to("home")
    with staging_folder(tmp_path / "run") as folder:
        assert folder.is_dir() and folder.resolve().parent == tmp_path / ".run.publish"
    left = [path.name for path in (tmp_path / "home").iterdir()]
    figure(f"left: {left}")
    assert left == ["documents"]


@pytest.mark.fault("A15", "a pipe in a folder of a run, or as a table", "refused in a line", before="waited for ever")
def test_a_pipe_in_a_run_is_refused(tmp_path: Path, figure: Figure) -> None:
    run = write_run(tmp_path / "run")
    for name in ("data.parquet", "run.json"):
        (tmp_path / "data").mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "data" / name)
        assert verify(tmp_path / "data").problems
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(RunError, match=r"config\.yaml is a pipe or a device; delete it") as refused:
        command("report", run)
    figure(str(refused.value).replace(str(tmp_path), ""))


def test_links_that_a_user_needs_are_followed(tmp_path: Path) -> None:
    """The folder itself may be one, and the cache of the Hub keeps files as links to its blobs."""
    run, snapshot = write_run(tmp_path / "elsewhere"), tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    (tmp_path / "run").symlink_to(run)
    (run / "latest").symlink_to("pairs")
    assert read_run(tmp_path / "run")
    shutil.copytree(Path("reasonrag/formats/prompts/default/reasonrag"), snapshot.parents[1] / "blobs")
    (snapshot / "prompts" / "reasonrag").mkdir(parents=True)
    (snapshot / "reasonrag.yaml").write_text("format: {prompts: prompts}\n")
    for blob in (snapshot.parents[1] / "blobs").iterdir():
        (snapshot / "prompts" / "reasonrag" / blob.name).symlink_to(f"../../../../blobs/{blob.name}")
    config = load_config(overrides={"policy.card": str(snapshot)})
    assert open_format(config).texts == open_format(load_config()).texts  # type: ignore[attr-defined]
