"""Publish a folder and its card on the HF Hub: private first, in one commit, verified there, then tagged.

Every step looks at the repository before it acts, so it may be repeated after any failure: a lost answer, a commit of
somebody else in between, a process that was killed. Content that is already there is neither sent nor committed again.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reasonrag.core.errors import ConfigError, HubError
from reasonrag.core.http import Unavailable
from reasonrag.core.secrets import excerpt
from reasonrag.publish.hub_client import HubCalls, quiet_client
from reasonrag.publish.staged_files import files_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile

    Operation = CommitOperationAdd | CommitOperationDelete

CARD = "README.md"
_NEVER_DELETED = (CARD, ".gitattributes")
_VERSION = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Upload:
    """What to upload, where to, and what may be deleted there."""

    repo_id: str  # OWNER/NAME
    repo_type: Literal["dataset", "model"]
    # All its files are uploaded byte for byte, except for a README.md at its top, which `card` writes.
    folder: Path
    # Maps the card that is there now (None: none) to the new card. Must not change a card that it made itself.
    card: Callable[[str | None], str]
    # Our files there: folders (`trees`) and patterns (`pairs/*.parquet`; `*` matches `/` too). A file of ours that
    # `folder` lacks is deleted in the same commit, or old shards would be read together with new ones.
    owned: tuple[str, ...]
    message: str  # title of the commit
    tag: str | None  # vX.Y.Z; None: the next minor version after the highest there, v1.0.0 at first
    public: bool  # make a new repository public, and allow writing to a public one; an existing one is not changed


@dataclass(frozen=True, slots=True)
class Published:
    """The published repository; `changed` is False if it held the same content before and no commit was made."""

    url: str
    commit: str
    tag: str
    private: bool
    changed: bool


def push(upload: Upload, *, say: Callable[[str], None], api: HfApi | None = None) -> Published:
    """Upload a folder in at most one commit, compare the repository with the folder, then tag the commit.

    Args:
        upload: what and where.
        say: prints one line about each step.
        api: the client; by default with huggingface_hub's own configuration (HF_ENDPOINT; HF_TOKEN or a login).

    Raises:
        ConfigError: nothing was sent: an id, a tag or a login cannot work, or the repository is public.
        HubError: the Hub refuses, does not answer, or holds something else than what was sent.
    """
    from huggingface_hub import HfApi, constants, get_token

    check_target(upload.repo_id, upload.tag)
    files = {name: upload.folder / name for name in files_of(upload.folder) if name != CARD}
    if not files:  # the commit would delete all that is ours there
        raise ConfigError(
            f"there is nothing to publish to {upload.repo_id}: the folder that was prepared holds no data"
        )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so the HF Hub cannot be reached: unset it to publish")
    api = api or HfApi(library_name="reasonrag")
    if not (api.token or get_token()):
        raise ConfigError("no login for the HF Hub: run `hf auth login`, or set HF_TOKEN to a token that may write")
    with quiet_client():
        return _Push(upload, files, api, say).run()


def check_target(repo_id: str, tag: str | None) -> None:
    """Check the names of a repository and a tag.

    Raises:
        ConfigError: one of them is not valid.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not marked so

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{excerpt(str(error))} A repository is named OWNER/NAME.") from None
    if "/" not in repo_id:
        raise ConfigError(f"{excerpt(repo_id)} names no owner: give OWNER/NAME")
    if tag is not None and not _VERSION.fullmatch(tag):
        raise ConfigError(f"{excerpt(tag)} is not a version: a tag is vX.Y.Z, such as v1.0.0")


@dataclass(frozen=True, slots=True)
class _Remote:
    """The state of a repository at one commit: visibility, files and card."""

    commit: str
    private: bool
    files: dict[str, RepoFile]
    card: str | None


class _Push:
    """One upload in progress; every method may be called again after a failure."""

    def __init__(self, upload: Upload, files: dict[str, Path], api: HfApi, say: Callable[[str], None]) -> None:
        from huggingface_hub import CommitOperationAdd

        self.upload, self.api, self.say = upload, api, say
        self.calls = HubCalls(upload.repo_id, say)
        self.additions = {name: CommitOperationAdd(name, path) for name, path in files.items()}
        self.base: _Remote | None = None  # the repository on which our last try to commit was based

    def run(self) -> Published:
        upload, create = self.upload, self.api.create_repo
        self.calls(
            "creating the repository",
            lambda: create(upload.repo_id, repo_type=upload.repo_type, private=not upload.public, exist_ok=True),
        )
        remote = self.calls("committing", self.commit)
        tag = self.calls("tagging", lambda: self.tag(remote.commit))
        url = f"{self.api.endpoint}/{'datasets/' if upload.repo_type == 'dataset' else ''}{upload.repo_id}"
        return Published(url, remote.commit, tag, remote.private, changed=self.base is not None)

    # -- what the repository holds ------------------------------------------------------------------------------------

    def read(self, revision: str | None = None) -> _Remote:
        """Return the repository at `revision` (None: now)."""
        from huggingface_hub import RepoFile

        repo, kind = self.upload.repo_id, self.upload.repo_type
        info = self.calls("reading the repository", lambda: self.api.repo_info(repo, repo_type=kind, revision=revision))
        if info.sha is None:
            raise HubError(f"{repo} has no commit, not even its first: delete it there and publish again")
        commit = info.sha
        tree = self.calls(
            "listing its files",
            lambda: list(self.api.list_repo_tree(repo, repo_type=kind, revision=commit, recursive=True)),
        )
        files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        card = self.calls("reading its card", lambda: self.card_at(commit)) if CARD in files else None
        return _Remote(commit, info.private is True, files, card)

    def card_at(self, commit: str) -> str:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but not marked so

        upload = self.upload
        url = hf_hub_url(upload.repo_id, CARD, repo_type=upload.repo_type, revision=commit, endpoint=self.api.endpoint)
        response = get_session().get(url, headers=build_hf_headers(token=self.api.token))
        hf_raise_for_status(response)
        return response.content.decode()

    def changes(self, remote: _Remote) -> list[Operation]:
        """Return the operations that a commit on top of `remote` needs; empty if the content is the same."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        card = self.upload.card(remote.card)
        if self.upload.card(card) != card:  # each run, and each retry, would make another commit
            raise HubError(f"{self.upload.repo_id}: the card changes again when it is merged with itself")
        operations: list[Operation] = []
        for name, addition in self.additions.items():
            if not _is_same(addition, remote.files.get(name)):
                # A copy, as a commit marks its operations as used. The sha256, which copies share, is computed once.
                operations.append(copy.copy(addition))
        if card != remote.card:
            operations.append(CommitOperationAdd(CARD, card.encode()))
        stale = remote.files.keys() - self.additions.keys() - set(_NEVER_DELETED)
        operations += [CommitOperationDelete(name, is_folder=False) for name in sorted(stale) if self.is_ours(name)]
        return operations

    def is_ours(self, name: str) -> bool:
        return name in self.additions or any(
            fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/") for pattern in self.upload.owned
        )

    # -- one commit ---------------------------------------------------------------------------------------------------

    def commit(self) -> _Remote:
        """Commit all changes, compare the repository with the folder, and return it.

        After a failure it first looks whether the commit arrived.

        Raises:
            ConfigError: the repository is public, or its tag is taken; nothing was sent.
            HubError: others changed our files meanwhile, or the Hub holds something else than what was sent.
        """
        repo, tag, remote = self.upload.repo_id, self.upload.tag, self.read()
        if not remote.private and not self.upload.public:
            raise ConfigError(
                f"{repo} is public, so nothing was sent: publish with --public, or to another repository, or make it "
                f"private in its settings"
            )
        if remote.private and self.upload.public:
            self.say(f"{repo} is private and stays so; its settings on the Hub make it public")
        changes = self.changes(remote)
        if not changes:
            self.say(f"{repo} holds this content at {remote.commit[:8]}")
            return remote
        self.check_others(remote)
        if tag is not None and tag in self.calls("reading its tags", self.tags):
            raise ConfigError(
                f"{repo} has {tag} already, with other content, and tags are never moved: choose a higher version, or "
                f"give none for the next"
            )
        self.send(changes, remote)
        self.base = remote
        commit = self.create_commit(changes, remote.commit)
        self.say(f"committed {commit[:8]}")
        arrived = self.read(commit)
        wrong = [operation.path_in_repo for operation in self.changes(arrived)]
        if wrong:
            raise HubError(
                f"{repo}: after commit {commit[:8]} the Hub lists {len(wrong)} files otherwise than they are here, "
                f"first {excerpt(wrong[0])}. No tag was made; look at that commit before it is used"
            )
        return arrived

    def check_others(self, remote: _Remote) -> None:
        """Raise if others changed our files since our last try: nobody would know which version counts.

        Others may commit to their own files while this upload is in progress.
        """
        if self.base is None or self.base.commit == remote.commit:
            return
        before, now, repo = self.base, remote, self.upload.repo_id
        moved = []
        for name in sorted(before.files.keys() | now.files.keys()):
            same = name in before.files and name in now.files and before.files[name].blob_id == now.files[name].blob_id
            if name != CARD and self.is_ours(name) and not same:
                moved.append(name)
        if not moved:
            return
        log = self.calls(
            "reading its history",
            lambda: self.api.list_repo_commits(repo, repo_type=self.upload.repo_type, revision=now.commit),
        )
        new = list(takewhile(lambda entry: entry.commit_id != before.commit, log))
        authors = sorted({author for entry in new for author in entry.authors})
        raise HubError(
            f"{repo} moved to {now.commit[:8]} while it was written to: {excerpt(', '.join(authors))} changed "
            f"{len(moved)} of the files that are to be published, first {excerpt(moved[0])} "
            f"({excerpt(new[0].title) if new else 'history was rewritten'}). Look at it, then publish again"
        )

    def send(self, changes: list[Operation], remote: _Remote) -> None:
        """Send the files' bytes; they become visible with the commit."""
        from huggingface_hub import CommitOperationAdd

        upload = self.upload
        additions = [operation for operation in changes if isinstance(operation, CommitOperationAdd)]
        megabytes = sum(addition.upload_info.size for addition in additions) / 1e6
        visibility = "private" if remote.private else "public"
        self.say(f"sending {len(additions)} files, {megabytes:.1f} MB, to {upload.repo_id} ({visibility})")
        self.calls(
            "sending files",
            lambda: self.api.preupload_lfs_files(
                upload.repo_id, additions, repo_type=upload.repo_type, free_memory=False
            ),
        )

    def create_commit(self, changes: list[Operation], parent: str) -> str:
        from huggingface_hub.errors import HfHubHTTPError

        upload = self.upload
        try:
            info = self.api.create_commit(
                upload.repo_id,
                changes,
                commit_message=upload.message,
                repo_type=upload.repo_type,
                parent_commit=parent,
            )
        except HfHubHTTPError as error:
            if error.response.status_code == 412:
                raise Unavailable("another commit came first") from None
            raise
        return info.oid

    # -- its tag ------------------------------------------------------------------------------------------------------

    def tag(self, commit: str) -> str:
        """Tag `commit` with the version asked for, else with the highest version if it is there, else with the next."""
        upload, names = self.upload, self.tags()
        tag = upload.tag or self.version(names, commit)
        if tag not in names:
            self.api.create_tag(
                upload.repo_id, tag=tag, tag_message=upload.message, revision=commit, repo_type=upload.repo_type
            )
            self.say(f"tagged {tag}")
        elif (tagged := self.tagged(tag)) != commit:
            raise ConfigError(
                f"{upload.repo_id} has {tag} at {tagged[:8]}, this content is at {commit[:8]}, and tags are never "
                f"moved: choose a higher version, or give none for the next"
            )
        return tag

    def tags(self) -> set[str]:
        refs = self.api.list_repo_refs(self.upload.repo_id, repo_type=self.upload.repo_type)
        return {ref.name for ref in refs.tags}

    def tagged(self, tag: str) -> str:
        # Not from list_repo_refs: an annotated tag may be listed with its own id.
        return str(self.api.repo_info(self.upload.repo_id, repo_type=self.upload.repo_type, revision=tag).sha)

    def version(self, names: set[str], commit: str) -> str:
        versions = [tuple(map(int, match.groups())) for name in names if (match := _VERSION.fullmatch(name))]
        if not versions:
            return "v1.0.0"
        major, minor, patch = max(versions)
        highest = f"v{major}.{minor}.{patch}"
        return highest if self.tagged(highest) == commit else f"v{major}.{minor + 1}.0"


def _is_same(addition: CommitOperationAdd, remote: RepoFile | None) -> bool:
    """Compare size and sha256, or git's hash of a file that is not in LFS."""
    if remote is None or remote.size != addition.upload_info.size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        data = file.read()
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
