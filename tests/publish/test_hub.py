"""Uploads with the real clients, to a Hub in this process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import close_session

from reasonrag.core.errors import ConfigError, HubError, ReasonRAGError
from reasonrag.publish.hub import Published, Upload, push
from tests.fakes.hub_state import TOKEN, USER, FakeHub, Repo

ROWS = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(50)]
DATA = "pairs/train-00000-of-00001.parquet"
METADATA = f"---\nconfigs:\n- config_name: pairs\n  data_files:\n  - split: train\n    path: {DATA}\n---\n"
ROUTES = ("create", "info", "preupload", "batch", "blob", "commit", "tag")
FAULTS: dict[str, dict[str, object]] = {
    "504 after": {"status": 504, "after": True},
    "401": {"status": 401},
    "reset after": {"reset": True, "after": True},
}


def with_metadata(card: str | None) -> str:
    """The simplest merge: ours on top, what was written by hand below."""
    return METADATA + (card or "# Pairs\n").removeprefix(METADATA)


@pytest.fixture
def upload(tmp_path: Path, request: pytest.FixtureRequest) -> Upload:
    """A small data set, for a repository of this test's own."""
    folder = tmp_path / "staged"
    (folder / "pairs").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / DATA, write_page_checksum=True)
    (folder / "config.json").write_text("{}\n")
    (folder / "README.md").write_text("not this one")
    name = re.sub(r"\W+", "-", request.node.name).strip("-")[-60:]
    return Upload(f"{USER}/{name}", "dataset", folder, with_metadata, ("pairs/*",), "50 pairs", None, False)


@pytest.fixture
def go(api: HfApi) -> Callable[..., Published]:
    """Publishes, silently."""
    return lambda upload, log=lambda line: None: push(upload, log=log, api=api)


def repo_of(hub: FakeHub, upload: Upload) -> Repo:
    return hub.repos[upload.repo_type + "s", upload.repo_id]


def assert_published(hub: FakeHub, upload: Upload, published: Published) -> None:
    """What is here is there, made by one commit that bears the tag."""
    repo = repo_of(hub, upload)
    (commit,) = repo.written
    assert (published.commit, published.private) == (commit.oid, True)
    assert repo.tags == {published.tag: commit.oid} == {"v1.0.0": commit.oid}
    sent = {path: blob.content for path, blob in commit.files.items() if path not in ("README.md", ".gitattributes")}
    assert sent == {path: (upload.folder / path).read_bytes() for path in (DATA, "config.json")}
    assert commit.files[DATA].lfs


def assert_one_line(error: ReasonRAGError, upload: Upload) -> None:
    line = str(error)
    assert upload.repo_id in line
    assert "\n" not in line
    for leaked in (TOKEN, TOKEN[:12], "/srv/hub", "X-Sign", str(upload.folder.parent)):
        assert leaked not in line


def test_one_commit_holds_the_files_and_bears_the_tag(hub, go, upload):
    (upload.folder / "trees").mkdir()
    published = go(upload)
    assert_published(hub, upload, published)
    assert published == Published(
        f"{hub.url}/datasets/{upload.repo_id}", published.commit, "v1.0.0", private=True, changed=True
    )


@pytest.mark.fault(
    "32",
    "the Hub answers 504 or 401, or closes the connection, in each of its calls",
    "refused with advice; no tag without its commit, and run again: exactly one commit, tagged",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_fault_in_any_call_is_refused_and_the_next_attempt_is_whole(hub, go, upload, route, fault, figure):
    figure(f"{len(FAULTS)} faults in each of {len(ROUTES)} calls, {len(FAULTS) * len(ROUTES)} cases")
    hub.fail(route, **FAULTS[fault])
    try:
        go(upload)
    except HubError as error:
        assert_one_line(error, upload)
        assert ("hf auth login" if fault == "401" else "run the same command again") in str(error)
        if (repo := hub.repos.get(("datasets", upload.repo_id))) is not None and repo.tags:
            assert route == "tag" and len(repo.written) == 1
    else:
        assert fault != "401"  # huggingface_hub repeats what sends files
    hub.clear()
    assert_published(hub, upload, go(upload))


@pytest.mark.fault("33", "the repository exists and is public", "refused without --public, and nothing is sent")
def test_nothing_is_sent_to_a_public_repository(hub, go, upload, figure):
    repo = hub.create("datasets", upload.repo_id, private=False)
    with pytest.raises(ConfigError, match="is public, so nothing was sent"):
        go(upload)
    figure(f"{hub.bytes_written()} bytes sent, {len(repo.written)} commits")
    assert hub.bytes_written() == 0
    assert not repo.written
    published = go(replace(upload, public=True))
    assert (published.private, len(repo.written)) == (False, 1)


def test_nothing_is_sent_to_a_repository_that_was_renamed(hub, go, upload):
    repo = hub.create("datasets", upload.repo_id, private=True)
    repo.renamed = "other/name"
    with pytest.raises(ConfigError, match="is called other/name at the Hub now, so nothing was sent"):
        go(upload)
    assert hub.bytes_written() == 0 and not repo.written


def test_the_same_content_is_not_committed_again(hub, go, upload):
    first = go(upload)
    hub.clear()
    assert go(upload) == replace(first, changed=False)
    assert hub.bytes_written() == 0


@pytest.mark.fault("34", "a card and files that others edited, then a second version", "text, tags and files are kept")
def test_a_second_version_keeps_the_hand_written_card_and_drops_old_shards(hub, go, upload, figure):
    go(upload)
    repo = repo_of(hub, upload)
    card = repo.commits[-1].files["README.md"].content + b"## By hand\r\n\xc3\xa4\n"
    repo.edit("README.md", card)
    repo.edit("pairs/test.parquet", b"old")
    repo.edit("notes.txt", b"theirs")
    (upload.folder / "config.json").write_text("{} \n")
    published = go(upload)
    assert published.tag == "v1.1.0"
    files = repo.commits[-1].files
    kept = "kept" if files["README.md"].content == card else "CHANGED"
    figure(f"{len(files)} files, theirs among them; what they wrote into the card is {kept}")
    assert files["README.md"].content == card
    assert sorted(files) == [".gitattributes", "README.md", "config.json", "notes.txt", DATA]


def test_a_card_that_is_not_utf8_is_named(hub, go, upload):
    go(upload)
    repo_of(hub, upload).edit("README.md", "# Café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"its README\.md is not UTF-8; mend or delete it on the Hub"):
        go(upload)


def test_a_run_killed_between_commit_and_tag_is_finished_by_the_next(hub, go, upload):
    class Killed(BaseException):
        pass

    def kill(line: str) -> None:
        if line.startswith("committed"):
            raise Killed

    with pytest.raises(Killed):
        go(upload, kill)
    assert repo_of(hub, upload).tags == {}
    published = go(upload)
    assert_published(hub, upload, published)
    assert not published.changed


def test_content_that_arrived_changed_gets_no_tag(hub, go, upload):
    def corrupt() -> None:
        for oid in hub.blobs:
            hub.blobs[oid] = bytes(len(hub.blobs[oid]))

    hub.fail("verify", after=True, do=corrupt)
    with pytest.raises(HubError, match=rf"lists 1 files otherwise than they are here, first {DATA}. No tag was made"):
        go(upload)
    repo = repo_of(hub, upload)
    assert (len(repo.written), repo.tags) == (1, {})


def test_a_tag_is_never_moved(hub, go, upload):
    go(replace(upload, tag="v1.0.0"))
    repo = repo_of(hub, upload)
    tags = dict(repo.tags)
    repo.edit("notes.txt", b"theirs")
    with pytest.raises(ConfigError, match="at another commit than this content"):
        go(replace(upload, tag="v1.0.0"))
    (upload.folder / "config.json").write_text("[]")
    hub.clear()
    with pytest.raises(ConfigError, match=r"has v1\.0\.0 already, with other content"):
        go(replace(upload, tag="v1.0.0"))
    assert hub.bytes_written() == 0
    assert repo.tags == tags


def test_a_card_alone_deletes_nothing(hub, go, upload):
    (upload.folder / "config.json").unlink()
    (upload.folder / DATA).unlink()
    with pytest.raises(ConfigError, match="nothing to publish"):
        go(upload)
    assert not hub.log


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repo_id": "pairs"}, "names no owner"),
        ({"repo_id": "a/b/c"}, "OWNER/NAME"),
        ({"repo_id": "../pairs"}, "OWNER/NAME"),
        ({"tag": "1.0"}, "is not a version"),
        ({"tag": "v1.0.0\n"}, "is not a version"),
    ],
)
def test_what_cannot_work_is_refused_before_any_request(hub, go, upload, wrong, message):
    with pytest.raises(ConfigError, match=message):
        go(replace(upload, **wrong))
    assert not hub.log


def test_without_a_login_nothing_is_asked(hub, upload, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="hf auth login"):
        push(upload, log=print, api=HfApi(endpoint=hub.url))
    assert not hub.log


def test_a_proxy_that_needs_another_package_is_one_line(hub, go, upload, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    close_session()
    try:
        with pytest.raises(HubError, match="SOCKS") as caught:
            go(upload)
    finally:
        monkeypatch.undo()
        close_session()
    assert_one_line(caught.value, upload)
