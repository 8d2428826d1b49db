"""What a HF Hub in memory holds, what it received, and which faults were ordered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException, Request

TOKEN = "hf_" + "aZ3" * 11 + "q"
USER = "ada"
READS = ("info", "tree", "refs", "resolve", "validate_yaml")


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Git's hash: of the content, or of the pointer to it."""
        data = self.content
        if self.lfs:
            data = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
                self.sha256.encode(),
                len(self.content),
            )
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def listed(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "oid": self.oid, "size": len(self.content)}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
        return entry


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    author: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """One repository: a line of commits, the first made by the Hub itself, and tags (name to commit)."""

    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    renamed: str = ""  # what it is called since then

    def commit(self, title: str, changes: dict[str, Blob | None], author: str = USER) -> Commit:
        files = (dict(self.commits[-1].files) if self.commits else {}) | changes
        kept = {path: blob for path, blob in sorted(files.items()) if blob is not None}
        content = "".join(f"{path} {blob.oid}" for path, blob in kept.items())
        oid = hashlib.sha1(f"{len(self.commits)} {title} {content}".encode()).hexdigest()
        self.commits.append(Commit(oid, title, author, kept))
        return self.commits[-1]

    def edit(self, path: str, content: bytes | None, *, author: str = "grace") -> None:
        """A commit of somebody else."""
        self.commit(f"edit {path}", {path: None if content is None else Blob(content, lfs=False)}, author)

    def at(self, revision: str) -> Commit:
        oid = self.commits[-1].oid if revision == "main" else self.tags.get(revision, revision)
        for commit in self.commits:
            if commit.oid == oid:
                return commit
        raise refused(404, "Invalid rev id", "RevisionNotFound")

    @property
    def written(self) -> list[Commit]:
        """The commits of the user who uploads, without the Hub's own first one."""
        return [commit for commit in self.commits[1:] if commit.author == USER]


@dataclass
class Fault:
    """What happens to the next `times` requests of a route, instead of its work or after it."""

    times: int
    status: int | None
    reset: bool
    after: bool
    do: Callable[[], None] | None


@dataclass(frozen=True)
class Entry:
    """A request that was received: its route, and how many bytes its body had."""

    route: str
    received: int


def refused(status: int, message: str, code: str = "") -> HTTPException:
    return HTTPException(status, message, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}))


class FakeHub:
    """Users' view: `url`, `repos` by (kind, OWNER/NAME), `log`, `fail`."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.log: list[Entry] = []
        self.faults: dict[str, list[Fault]] = {}

    def fail(
        self,
        route: str,
        *,
        times: int = 1,
        status: int | None = None,
        reset: bool = False,
        after: bool = False,
        do: Callable[[], None] | None = None,
    ) -> None:
        """Answer with `status`, cut the connection (`reset`) or just `do` something; `after` the work was done."""
        self.faults.setdefault(route, []).append(Fault(times, status, reset, after, do))

    def clear(self) -> None:
        """Forget faults and log, not what is stored."""
        self.faults.clear()
        self.log.clear()

    def create(self, kind: str, repo_id: str, *, private: bool) -> Repo:
        repo = self.repos[kind, repo_id] = Repo(private)
        repo.commit("initial commit", {".gitattributes": Blob(b"*.parquet filter=lfs\n", lfs=False)}, author="hub")
        return repo

    def page(self, kind: str, repo_id: str) -> str:
        return f"{self.url}/{'datasets/' if kind == 'datasets' else ''}{repo_id}"

    def bytes_written(self) -> int:
        """Bytes of all request bodies but those of reads and of the creation."""
        return sum(entry.received for entry in self.log if entry.route not in (*READS, "create"))

    def repo(self, request: Request) -> Repo:
        """The repository a request is about, if its login may see it."""
        owner, name = request.path_params["owner"], request.path_params["name"]
        repo = self.repos.get((request.path_params.get("kind", "models"), f"{owner}/{name}"))
        if repo is None or (repo.private and not authorized(request)):
            raise refused(404 if authorized(request) else 401, "Repository not found", "RepoNotFound")
        return repo

    def next_fault(self, route: str) -> Fault | None:
        faults = self.faults.get(route, [])
        while faults and not faults[0].times:
            faults.pop(0)
        if not faults:
            return None
        faults[0].times -= 1
        return faults[0]


def authorized(request: Request) -> bool:
    return request.headers.get("authorization") == f"Bearer {TOKEN}"
