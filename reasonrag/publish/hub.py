"""Publish a folder and its card on the HF Hub: private first, in one commit, verified there, then tagged.

Every attempt reads the repository before it changes anything, so it can be repeated after a lost answer
or a killed process: files that are already there are neither sent nor committed again.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reasonrag.core.errors import ConfigError, HubError
from reasonrag.core.text import excerpt

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi, RepoFile

CARD = "README.md"
TIMEOUT_S = 60.0  # that the Hub may be silent in one request

_VERSION = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", re.ASCII)
_ADVICE = {
    401: "this login is not accepted: run `hf auth login`, or set HF_TOKEN to a token that may write there",
    403: "this login may not do that: use a token that may write there",
    404: "the repository does not exist, or this login may not see it",
}
_MISSHAPEN = (LookupError, TypeError, AttributeError)  # what a reply of another shape raises
_NEVER_MOVED = "and tags are never moved: choose a higher version, or give none for the next"
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Upload:
    """The files to upload, and the repository that gets them."""

    repo_id: str  # OWNER/NAME
    repo_type: Literal["dataset", "model"]
    folder: Path  # all its files are uploaded byte for byte, except for a README.md at its top, which `card` writes
    card: Callable[[str | None], str]  # maps the card on the Hub (None without one) to the new card
    # Patterns of our files, such as `pairs/*`. Files that `folder` lacks are deleted in the same commit,
    # or `load_dataset` would read old shards together with new ones.
    owned: tuple[str, ...]
    message: str  # title of the commit
    tag: str | None  # vX.Y.Z; None: the next minor version after the highest there, v1.0.0 at first
    public: bool  # make a new repository public, and allow writing to a public one; an existing one is not changed


@dataclass(frozen=True, slots=True)
class Published:
    """The published repository; `changed` is False if it held the same content before."""

    url: str
    commit: str
    tag: str
    private: bool
    changed: bool


def push(upload: Upload, *, log: Log, api: HfApi | None = None) -> Published:
    """Upload a folder in at most one commit, compare the repository with the folder, then tag the commit.

    Args:
        upload: files and repository.
        log: prints one line about each step.
        api: the client; by default with huggingface_hub's own
            configuration (HF_ENDPOINT; HF_TOKEN or a login).

    Raises:
        ConfigError: an id, a tag or a login cannot work, or the repository is public; nothing was sent.
        HubError: the Hub refuses, does not answer, or lists other content than was sent.
    """
    from huggingface_hub import HfApi, constants, get_session, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    check_target(upload.repo_id, upload.tag)
    api = api or HfApi(library_name="reasonrag")
    if constants.HF_HUB_OFFLINE or not (api.token or get_token()):
        raise ConfigError(
            "publishing needs a login for the HF Hub, and HF_HUB_OFFLINE not to be set: run `hf auth login`, or set "
            "HF_TOKEN to a token that may write"
        )
    # Only a card, or nothing at all.
    if files_of(upload.folder) in ([], [CARD]):  # the commit would delete all our files there
        raise ConfigError(f"there is nothing to publish to {upload.repo_id}: the prepared folder holds no data")
    if not sys.stderr.isatty():
        disable_progress_bars()
    logging.set_verbosity(40)  # errors alone: warnings show URLs

    http_error: type[Exception] = HfHubHTTPError.__bases__[0]  # of httpx or httpx2, by the version of huggingface_hub
    try:
        # Every request of the session gets a timeout: huggingface_hub passes `timeout=None` in many calls.
        hooks = get_session().event_hooks["request"]
        if _set_timeout not in hooks:
            get_session().event_hooks |= {"request": [*hooks, _set_timeout]}
        return _attempt(upload, api, log)
    except (http_error, ImportError, OSError, RuntimeError, ValueError, *_MISSHAPEN) as error:
        # ImportError: of a proxy that speaks SOCKS. huggingface_hub itself repeats requests that send files.
        raise HubError(
            f"{upload.repo_id}: {_explain(error, http_error)}; run the same command again later: nothing is sent or "
            "committed twice"
        ) from None


def check_target(repo_id: str, tag: str | None) -> None:
    """Raise ConfigError if a repository or a tag cannot have this name."""
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


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _attempt(upload: Upload, api: HfApi, log: Log) -> Published:
    """Create the repository, commit what differs, verify the commit, and tag it."""
    from huggingface_hub import CommitOperationDelete

    repo, kind = upload.repo_id, upload.repo_type
    # Private from the start: a repository that is made private later was public for a moment.
    api.create_repo(repo, repo_type=kind, private=not upload.public, exist_ok=True)
    info = api.repo_info(repo, repo_type=kind)
    if info.id != repo:
        raise ConfigError(f"{repo} is called {excerpt(info.id)} at the Hub now, so nothing was sent: publish to that")
    if not info.private and not upload.public:
        raise ConfigError(
            f"{repo} is public, so nothing was sent: publish with --public, or to another repository, or make it "
            "private in its settings"
        )
    # The state that is compared is the state that is changed: the Hub refuses the commit (HTTP 412) if
    # another one came between them, because it names its parent.
    parent = commit = str(info.sha)
    remote = _listed(upload, api, parent)
    additions = _additions(upload, api, parent, remote)
    changed = [addition for path, addition in additions.items() if not _is_same(addition, remote.get(path))]
    stale = {name for pattern in upload.owned for name in fnmatch.filter(remote, pattern)} - additions.keys()
    tags = {ref.name for ref in api.list_repo_refs(repo, repo_type=kind).tags}
    if changed or stale:
        if upload.tag in tags:
            raise ConfigError(f"{repo} has {upload.tag} already, with other content, {_NEVER_MOVED}")
        megabytes = sum(addition.upload_info.size for addition in changed) / 1e6
        log(f"sending {len(changed)} files, {megabytes:.1f} MB, to {repo} ({'private' if info.private else 'public'})")
        deletions = [CommitOperationDelete(name, is_folder=False) for name in sorted(stale)]
        # `create_commit`, not `upload_folder`, which may make several commits of a large folder.
        commit = api.create_commit(
            repo, [*changed, *deletions], commit_message=upload.message, repo_type=kind, parent_commit=parent
        ).oid
        log(f"committed {commit[:8]}")
        # What counts is what the Hub lists after the commit, not what was sent.
        arrived = _listed(upload, api, commit)
        wrong = [path for path, addition in additions.items() if not _is_same(addition, arrived.get(path))]
        wrong += sorted(stale & arrived.keys())
        if wrong:
            raise HubError(
                f"{repo}: after commit {commit[:8]} the Hub lists {len(wrong)} files otherwise than they are here, "
                f"first {excerpt(wrong[0])}. No tag was made; look at that commit before it is used"
            )
    tag = _tag(upload, api, tags, commit, log)
    url = f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    return Published(url, commit, tag, bool(info.private), changed=commit != parent)


def _additions(upload: Upload, api: HfApi, commit: str, remote: dict[str, RepoFile]) -> dict[str, CommitOperationAdd]:
    """Return what the repository has to hold: the files of the folder, and the card merged with the one there."""
    from huggingface_hub import CommitOperationAdd, HfFileSystem

    old_card = None
    if CARD in remote:
        files = HfFileSystem(endpoint=api.endpoint, token=api.token, skip_instance_cache=True, use_listings_cache=False)
        folder = "datasets/" if upload.repo_type == "dataset" else ""
        try:
            old_card = files.read_bytes(f"{folder}{upload.repo_id}@{commit}/{CARD}").decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{upload.repo_id}: its {CARD} is not UTF-8; mend or delete it on the Hub") from None
    additions = {name: CommitOperationAdd(name, upload.folder / name) for name in files_of(upload.folder)}
    return additions | {CARD: CommitOperationAdd(CARD, upload.card(old_card).encode())}


def _listed(upload: Upload, api: HfApi, commit: str) -> dict[str, RepoFile]:
    """Return the files of a commit by their paths."""
    from huggingface_hub import RepoFile

    tree = api.list_repo_tree(upload.repo_id, repo_type=upload.repo_type, revision=commit, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _is_same(addition: CommitOperationAdd, remote: RepoFile | None) -> bool:
    """Compare size and sha256, or git's hash of a file that is not in LFS."""
    from huggingface_hub.utils.sha import git_hash

    if remote is None or remote.size != addition.upload_info.size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        return remote.blob_id == git_hash(file.read())


def _tag(upload: Upload, api: HfApi, tags: set[str], commit: str, log: Log) -> str:
    """Tag `commit` with the version asked for, else with the highest version if it is there, else with the next."""

    def is_tagged(tag: str) -> bool:
        # Not from `list_repo_refs`: an annotated tag may be listed with its own id.
        return bool(api.repo_info(upload.repo_id, repo_type=upload.repo_type, revision=tag).sha == commit)

    if (tag := upload.tag) is None:
        matches = [match for match in map(_VERSION.fullmatch, tags) if match]
        major, minor, patch = max((tuple(map(int, match.groups())) for match in matches), default=(1, -1, 0))
        highest = f"v{major}.{minor}.{patch}"
        tag = highest if highest in tags and is_tagged(highest) else f"v{major}.{minor + 1}.0"
    if tag not in tags:
        api.create_tag(upload.repo_id, tag=tag, tag_message=upload.message, revision=commit, repo_type=upload.repo_type)
        log(f"tagged {tag}")
    elif not is_tagged(tag):
        raise ConfigError(
            f"{upload.repo_id} has {tag} at another commit than this content ({commit[:8]}), {_NEVER_MOVED}"
        )
    return tag


def _set_timeout(request: Any) -> None:
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)


def _explain(error: Any, http_error: type[Exception]) -> str:
    """Explain a failure without URLs, some of which are signed, and without paths and secrets."""
    # The words of a server may repeat the request, with its token and with signed URLs.
    while error.__cause__ is not None and not isinstance(error, http_error):
        error = error.__cause__  # the library wraps some errors
    response = getattr(error, "response", None)
    message = str(error) if response is None else getattr(error, "server_message", None) or ""
    plain = excerpt(" ".join("..." if word.count("/") > 1 else word for word in message.split()))
    if response is None:
        return f"{type(error).__name__}: {plain}"
    advice = _ADVICE.get(response.status_code, f"the Hub answers {response.status_code}")
    return f"{advice} (HTTP {response.status_code}{', ' * bool(plain)}{plain})"
