"""A folder and its card to the HF Hub: private first, one commit, verified there, then tagged.

Every step looks at what is there before it acts, so it may be repeated after any failure: a lost answer, a commit of
somebody else in between, a process that was killed. What is there already is neither sent nor committed again.
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
from reasonrag.publish.hub_calls import Calls, Unavailable, quiet_client, quoted

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile

CARD = "README.md"
_NEVER_DELETED = (CARD, ".gitattributes")
_VERSION = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Upload:
    """What goes up, where, and what may be deleted there.

    Args:
        repo_id: `OWNER/NAME`.
        repo_type: a data set or a model.
        folder: everything in it goes up, byte for byte, but a `README.md` at its top, which `card` writes.
        card: the card there now (None: none) -> the card that goes up. It may be called again, and must not change a
            card that it made itself.
        owned: what is ours there: folders (`trees`) and patterns (`pairs/*.parquet`; `*` matches `/` too). A file of
            ours that `folder` lacks is deleted in the same commit, or old shards would be read with new ones.
        message: title of the commit.
        tag: `vX.Y.Z`. None: the next minor version after the highest there, v1.0.0 at first.
        public: a new repository is made public, and an existing public one may be written to. An existing one stays as
            private or public as it is.
    """

    repo_id: str
    repo_type: Literal["dataset", "model"]
    folder: Path
    card: Callable[[str | None], str]
    owned: tuple[str, ...]
    message: str
    tag: str | None
    public: bool


@dataclass(frozen=True, slots=True)
class Published:
    """What is on the Hub now; `changed` is False when the same content was there before and no commit was made."""

    url: str
    commit: str
    tag: str
    private: bool
    changed: bool


def push(upload: Upload, *, say: Callable[[str], None], api: HfApi | None = None) -> Published:
    """Bring `upload` to the Hub in at most one commit, compare what is there with what is here, then tag it.

    Args:
        upload: what and where.
        say: told of each step in one line.
        api: the client; by default that of huggingface_hub's own configuration (HF_ENDPOINT; HF_TOKEN or a login).

    Raises:
        ConfigError: nothing was sent: an id, a tag or a login that cannot work; a public repository without `public`.
        HubError: the Hub refuses, does not answer, or holds something else than what was sent.
    """
    from huggingface_hub import HfApi, constants, get_token

    check_target(upload.repo_id, upload.tag)
    files = _files(upload.folder)
    if not files:  # all that is ours there would be deleted
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
    """See that a repository and a tag may be called so.

    Raises:
        ConfigError: they may not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not marked so

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{quoted(str(error))} A repository is named OWNER/NAME.") from None
    if "/" not in repo_id:
        raise ConfigError(f"{quoted(repo_id)} names no owner: give OWNER/NAME")
    if tag is not None and not _VERSION.fullmatch(tag):
        raise ConfigError(f"{quoted(tag)} is no version: a tag is vX.Y.Z, such as v1.0.0")


def _files(folder: Path) -> dict[str, Path]:
    """What goes up besides the card, by its name there."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in paths.items() if name != CARD}


@dataclass(frozen=True, slots=True)
class _Remote:
    """A repository at one commit."""

    commit: str
    private: bool
    files: dict[str, RepoFile]
    card: str | None


class _Push:
    """One upload on its way."""

    def __init__(self, upload: Upload, files: dict[str, Path], api: HfApi, say: Callable[[str], None]) -> None:
        from huggingface_hub import CommitOperationAdd

        self.upload, self.api, self.say = upload, api, say
        self.calls = Calls(upload.repo_id, say)
        self.here = {name: CommitOperationAdd(name, path) for name, path in files.items()}
        self.seen: _Remote | None = None  # what our last try to commit was made against

    def run(self) -> Published:
        repo, kind = self.upload.repo_id, self.upload.repo_type
        self.calls("creating the repository", self.create)
        there = self.calls("committing", self.commit)
        tag = self.calls("tagging", lambda: self.tag(there.commit))
        url = f"{self.api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        return Published(url, there.commit, tag, there.private, changed=self.seen is not None)

    def create(self) -> None:
        upload = self.upload
        self.api.create_repo(upload.repo_id, repo_type=upload.repo_type, private=not upload.public, exist_ok=True)

    # -- what is there ------------------------------------------------------------------------------------------------

    def read(self, revision: str | None = None) -> _Remote:
        """The repository at `revision` (None: now)."""
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

    def missing(self, there: _Remote) -> list[CommitOperationAdd | CommitOperationDelete]:
        """What a commit on top of `there` has to do for it to hold what is here; empty if it does."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        card = self.upload.card(there.card)
        if self.upload.card(card) != card:  # each run would make another commit, and each retry
            raise HubError(f"{self.upload.repo_id}: the card changes again when it is merged with itself")
        # Copies, as a commit marks its operations as used; the sha256 they share is computed once.
        missing: list[CommitOperationAdd | CommitOperationDelete] = [
            copy.copy(add) for name, add in self.here.items() if not _same(add, there.files.get(name))
        ]
        if card != there.card:
            missing.append(CommitOperationAdd(CARD, card.encode()))
        stale = there.files.keys() - self.here.keys() - set(_NEVER_DELETED)
        missing += [CommitOperationDelete(name, is_folder=False) for name in sorted(stale) if self.is_ours(name)]
        return missing

    def is_ours(self, name: str) -> bool:
        owned = self.upload.owned
        return name in self.here or any(
            fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/") for pattern in owned
        )

    # -- one commit ---------------------------------------------------------------------------------------------------

    def commit(self) -> _Remote:
        """The repository with everything in it. Made again after a failure, it first looks whether the commit is in."""
        there = self.read()
        self.refuse_public(there)
        missing = self.missing(there)
        if not missing:
            self.say(f"{self.upload.repo_id} holds this content at {there.commit[:8]}")
            return there
        self.refuse_moved(there)
        self.refuse_used_tag()
        self.send(missing, there)
        self.seen = there
        commit = self.create_commit(missing, there.commit)
        self.say(f"committed {commit[:8]}")
        return self.verified(commit)

    def refuse_public(self, there: _Remote) -> None:
        repo = self.upload.repo_id
        if not there.private and not self.upload.public:
            raise ConfigError(
                f"{repo} is public, so nothing was sent: publish with --public, or to another repository, or make it "
                f"private in its settings"
            )
        if there.private and self.upload.public:
            self.say(f"{repo} is private and stays so; its settings on the Hub make it public")

    def refuse_moved(self, there: _Remote) -> None:
        """Others may commit while this upload goes on, but not to its files: nobody would know which of them count."""
        if self.seen is None or self.seen.commit == there.commit:
            return
        before, now, repo = self.seen.files, there.files, self.upload.repo_id
        moved = [
            name
            for name in sorted(before.keys() | now.keys())
            if name != CARD and self.is_ours(name) and _blob(before.get(name)) != _blob(now.get(name))
        ]
        if not moved:
            return
        log = self.calls(
            "reading its history",
            lambda: self.api.list_repo_commits(repo, repo_type=self.upload.repo_type, revision=there.commit),
        )
        new = list(takewhile(lambda entry: self.seen is not None and entry.commit_id != self.seen.commit, log))
        authors = sorted({author for entry in new for author in entry.authors})
        raise HubError(
            f"{repo} moved to {there.commit[:8]} while it was written to: {quoted(', '.join(authors))} changed "
            f"{len(moved)} of the files that are to be published, first {quoted(moved[0])} "
            f"({quoted(new[0].title) if new else 'history was rewritten'}). Look at it, then publish again"
        )

    def refuse_used_tag(self) -> None:
        tag = self.upload.tag
        if tag is not None and tag in self.calls("reading its tags", self.tags):
            raise ConfigError(
                f"{self.upload.repo_id} has {tag} already, with other content, and tags are never moved: choose a "
                f"higher version, or give none for the next"
            )

    def send(self, missing: list[CommitOperationAdd | CommitOperationDelete], there: _Remote) -> None:
        """The files' bytes; none is visible before the commit."""
        from huggingface_hub import CommitOperationAdd

        upload = self.upload
        additions = [operation for operation in missing if isinstance(operation, CommitOperationAdd)]
        megabytes = sum(add.upload_info.size for add in additions) / 1e6
        visibility = "private" if there.private else "public"
        self.say(f"sending {len(additions)} files, {megabytes:.1f} MB, to {upload.repo_id} ({visibility})")
        self.calls(
            "sending files",
            lambda: self.api.preupload_lfs_files(
                upload.repo_id, additions, repo_type=upload.repo_type, free_memory=False
            ),
        )

    def create_commit(self, missing: list[CommitOperationAdd | CommitOperationDelete], parent: str) -> str:
        from huggingface_hub.errors import HfHubHTTPError

        upload = self.upload
        try:
            info = self.api.create_commit(
                upload.repo_id,
                missing,
                commit_message=upload.message,
                repo_type=upload.repo_type,
                parent_commit=parent,
            )
        except HfHubHTTPError as error:
            if error.response.status_code == 412:
                raise Unavailable("another commit came first") from None
            raise
        return info.oid

    def verified(self, commit: str) -> _Remote:
        there = self.read(commit)
        wrong = [operation.path_in_repo for operation in self.missing(there)]
        if wrong:
            raise HubError(
                f"{self.upload.repo_id}: after commit {commit[:8]} the Hub lists {len(wrong)} files otherwise than "
                f"they are here, first {quoted(wrong[0])}. No tag was made; look at that commit before anybody uses it"
            )
        return there

    # -- its tag ------------------------------------------------------------------------------------------------------

    def tag(self, commit: str) -> str:
        """A tag on `commit`: the one asked for, the highest version if it stands there, else the next version."""
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


def _same(add: CommitOperationAdd, there: RepoFile | None) -> bool:
    """Whether the Hub lists the local file's size and sha256, or git's hash of a file that is not in LFS."""
    if there is None or there.size != add.upload_info.size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == add.upload_info.sha256.hex()
    with add.as_file() as file:
        data = file.read()
    return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _blob(file: RepoFile | None) -> str | None:
    return None if file is None else file.blob_id
