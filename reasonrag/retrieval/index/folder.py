"""The folder of an index. Each of its parts exists completely or not at all, and records its inputs.

    DIR/
    ├── passages/      passages.jsonl and the offset of each line
    ├── bm25/          files of bm25s
    ├── embeddings/    one vector per passage, in shards
    ├── vectors/       a FAISS index over the embeddings; missing if the search is exact
    ├── .building-*/   an unfinished part; the same command resumes it
    ├── .encoder.json  location of the encoder on this machine
    ├── .verified.json files that passed their checksum, with their size, time and inode then
    └── .lock

Each part has a `manifest.json`: inputs, settings, counts, and size and SHA-256 of every file. No part
records when, where or how fast it was built, so the same input gives the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

from reasonrag.core.errors import DataError
from reasonrag.storage.files import read_json, short_hash, write_json, writing
from reasonrag.storage.folder import Folder, checksums, damage

Part = Literal["passages", "bm25", "embeddings", "vectors"]
PARTS: tuple[Part, ...] = get_args(Part)

_LAYOUT = 1  # increase it when the content of a part changes
_MANIFEST, _VERIFIED, _PLAN, _SCRATCH = "manifest.json", ".verified.json", "plan.json", "scratch"
_REBUILD = "build the index again, or copy it again"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides the bytes of a part."""

    part: Part
    made_of: Mapping[str, str]  # fingerprints of other parts by name, checksums of a corpus, identity of a model
    settings: Mapping[str, Any] = field(default_factory=dict)  # values that JSON can hold
    versions: Mapping[str, str] = field(default_factory=dict)  # of the libraries that write the part

    def document(self) -> dict[str, Any]:
        """Return the plan as parsed JSON, so that it compares equal with one read from disk."""
        document: dict[str, Any] = json.loads(json.dumps({"layout": _LAYOUT, **asdict(self)}))
        return document

    def same(self, other: Plan) -> bool:
        """Return whether both plans give the same bytes."""
        documents = []
        for plan in (self, other):
            document = plan.document()
            document["settings"].pop("encoder", None)  # `made_of` has the checksum of what counts in it
            documents.append(document)
        return documents[0] == documents[1]


@dataclass(frozen=True)
class Manifest:
    """A finished part: its plan, counts, and size (bytes) and SHA-256 of each file, by path within the part."""

    plan: Plan
    counts: Mapping[str, int]
    files: Mapping[str, tuple[int, str]]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of a hash over plan, counts and files."""
        return short_hash(self.document())

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(size for size, _ in self.files.values())

    def document(self) -> dict[str, Any]:
        files = {name: [size, digest] for name, (size, digest) in self.files.items()}
        return {**self.plan.document(), "counts": dict(self.counts), "files": files}


class BuildProgress(Protocol):
    """Listens to a build: a terminal, a log, or `Silent`."""

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """Begin a stage of `total` units, None if unknown; an earlier attempt has finished `done` of them."""
        return

    def advance(self, amount: float = 1.0) -> None:
        """Count so many more units as done."""
        return

    def note(self, text: str) -> None:
        """Keep a line, such as the rows that were set aside, or a choice and its reason."""
        return


class Silent(BuildProgress):
    """Shows nothing, for builds within another command."""


class Draft:
    """A part that is being built. Files written through it survive a kill; `finish` makes it a part of the index."""

    def __init__(self, index: IndexFolder, plan: Plan, *, alone: bool = True) -> None:
        """Resume in the working folder if it has the same plan, else clear it.

        `alone` is whether no other process writes in it now.
        """
        self.folder = index.path / f".building-{plan.part}"
        self._index = index
        self.plan = plan
        plan_file = self.folder / _SCRATCH / _PLAN
        if read_json(plan_file) != plan.document():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            write_json(plan_file, plan.document(), indent=None)
        for partial_file in self.folder.rglob("*.tmp") if alone else ():  # a killed process left them
            partial_file.unlink()

    @property
    def scratch(self) -> Path:
        """Folder for files that the finished part does not need. It survives a kill."""
        return self.folder / _SCRATCH

    @contextlib.contextmanager
    def writing(self, name: str, *, scratch: bool = False) -> Iterator[IO[bytes]]:
        """Open a file that exists completely or not at all, and is on disk when the block ends."""
        target = (self.scratch if scratch else self.folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with writing(target) as file:
            yield file

    def holds(self, name: str, *, scratch: bool = False) -> bool:
        """Return whether that file was written, by this process or by one that was killed."""
        return ((self.scratch if scratch else self.folder) / name).exists()

    def finish(self, counts: Mapping[str, int]) -> Manifest:
        """Checksum all files and rename the working folder to the part, in place of an older one."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and self.scratch not in path.parents]
        files = {name: (int(size), str(digest)) for name, (size, digest) in checksums(self.folder, paths).items()}
        manifest = Manifest(self.plan, dict(counts), files)
        document = {**manifest.document(), "fingerprint": manifest.fingerprint}
        write_json(self.folder / _MANIFEST, document, indent=1)
        self._index.settle()
        return manifest


class IndexFolder:
    """An index on disk. Reading is safe while another process builds; building happens under `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        unfinished = [f".building-{part}" for part in PARTS]
        self._folder = Folder(path, "search index", f"*/{_MANIFEST}", ignore=[*unfinished, _VERIFIED])

    def part(self, part: Part) -> Path:
        """Return the folder of a part, which need not exist."""
        return self.path / part

    @contextlib.contextmanager
    def locked(self, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the folder's lock. If another process builds in the folder, call `waiting`, then wait for it.

        Raises:
            RunError: the folder holds other files, or cannot be written.
        """
        with self._folder.locked(waiting=waiting):
            self.settle()
            yield

    def manifest(self, part: Part) -> Manifest | None:
        """Read the manifest of a finished part; None if the part is missing.

        Raises:
            DataError: the manifest is damaged, or another version of reasonrag wrote it.
        """
        path = self.part(part) / _MANIFEST
        if not path.exists():
            return None
        document = read_json(path) or {}
        try:
            if document["layout"] != _LAYOUT:
                raise DataError(
                    f"index {self.path}: {part} was built by another version of reasonrag (layout "
                    f"{document['layout']}, this version reads {_LAYOUT}); run `index build` in a new folder"
                )
            plan = Plan(part, document["made_of"], document["settings"], document["versions"])
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in document["files"].items()}
            manifest = Manifest(plan, document["counts"], files)
            if document["fingerprint"] != manifest.fingerprint:
                raise ValueError
            return manifest
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(f"index {self.path}: {part}/{_MANIFEST} is damaged; {_REBUILD}") from None

    def need(self, part: Part) -> Manifest:
        """Read the manifest of a part; raise DataError if the part is missing, or its manifest is damaged."""
        manifest = self.manifest(part)
        if manifest is None:
            content = f"is an index of {', '.join(self.parts())}" if self.parts() else "is not an index"
            advice = "give the folder that `index build` wrote, or build it"
            if any(self.path.glob(".building-*")):
                advice = "its build was not finished, run the same index build again"
            raise DataError(f"{self.path} {content}, and has no {part}; {advice}")
        return manifest

    def parts(self) -> list[Part]:
        return [part for part in PARTS if (self.part(part) / _MANIFEST).exists()]

    def sound(self, plan: Plan) -> Manifest | None:
        """Return the manifest of the part with this plan; None if it is missing or damaged."""
        with contextlib.suppress(DataError):
            manifest = self.manifest(plan.part)
            if manifest is not None and manifest.plan.same(plan):
                return self.verify(plan.part)
        return None

    def settle(self) -> None:
        """Rename finished drafts to parts. A process may have been killed at any point of this."""
        for part in PARTS:
            draft = self.path / f".building-{part}"
            if (draft / _MANIFEST).exists():
                shutil.rmtree(draft / _SCRATCH, ignore_errors=True)
                self.remove(part)
                draft.rename(self.part(part))
                self._remember(part, self.need(part))

    def remove(self, part: Part) -> None:
        shutil.rmtree(self.part(part), ignore_errors=True)

    def verify(self, part: Part, *, fully: bool = False) -> Manifest:
        """Check that a part's files are the ones that were written.

        A file is checksummed only if its size, modification time or inode changed since the last checksum, or if it was
        never checksummed on this machine. So a copy is read whole once, and opening stays quick. `fully` checksums
        every file in any case.

        Raises:
            DataError: a file is missing, truncated or changed, or the part was built over another version of a part.
        """
        manifest = self.need(part)
        for other in PARTS:
            under = self.manifest(other) if other in manifest.plan.made_of else None
            if under is not None and under.fingerprint != manifest.plan.made_of[other]:
                raise DataError(
                    f"index {self.path}: {part} was built over other {other} than the folder holds; {_REBUILD}"
                )
        verified = {} if fully else self._verified(part, manifest)
        for name, expected in manifest.files.items():
            if name in verified and verified[name] == _stamp(self.part(part) / name):
                continue
            if problem := damage(self.part(part), {name: expected}):
                raise DataError(f"index {self.path}: {part}/{problem}; {_REBUILD}")
        self._remember(part, manifest)
        return manifest

    def _verified(self, part: Part, manifest: Manifest) -> dict[str, list[int]]:
        """Return the stamps of the files that were checksummed before, if they belong to this manifest."""
        entry = (read_json(self.path / _VERIFIED) or {}).get(part)
        if not isinstance(entry, dict) or entry.get("fingerprint") != manifest.fingerprint:
            return {}
        files = entry.get("files")
        return files if isinstance(files, dict) else {}

    def _remember(self, part: Part, manifest: Manifest) -> None:
        files = {name: _stamp(self.part(part) / name) for name in manifest.files}
        if self._verified(part, manifest) == files:
            return
        document = read_json(self.path / _VERIFIED) or {}
        document[part] = {"fingerprint": manifest.fingerprint, "files": files}
        with contextlib.suppress(OSError):  # a read-only folder is checksummed at every opening
            write_json(self.path / _VERIFIED, document, indent=None)


def _stamp(path: Path) -> list[int]:
    """Return size, modification time and inode of a file; an empty list if it is missing."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return []
