"""The folder of an index: parts that are each whole or not there, and that know what they are made of.

    DIR/
    ├── passages/      what is found: passages.jsonl and where each line begins
    ├── bm25/          bm25s files
    ├── embeddings/    one vector a passage, in shards
    ├── vectors/       a FAISS index over the embeddings; absent where the search is exact
    ├── .building-*/   a part that is being built, or was when the process was killed: the same command goes on there
    ├── .encoder.json  where the encoder lay on this machine
    ├── .verified.json which files were read to the last byte, and their times since
    └── .lock

Each part has a `manifest.json`: what it is made of, settings, counts, and size and SHA-256 of every file. Nothing in a
part says when, where or how fast it was built, so the same input gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

from reasonrag.core.errors import DataError
from reasonrag.storage.files import fsync_folder, lock, read_json, write_json, writing

Part = Literal["passages", "bm25", "embeddings", "vectors"]
PARTS: tuple[Part, ...] = get_args(Part)

_LAYOUT = 1  # raise it when what a part holds changes
_MANIFEST, _VERIFIED, _PLAN, _SCRATCH = "manifest.json", ".verified.json", "plan.json", "scratch"
_REBUILD = "build the index again, or copy it again"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the bytes of a part.

    Args:
        part: which one.
        made_of: the fingerprint of each part that it is made of, by that part's name; or name and checksum of a
            corpus, identity of a model.
        settings: as JSON.
        versions: of the libraries that write it.
    """

    part: Part
    made_of: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON holds it."""
        document: dict[str, Any] = json.loads(json.dumps({"layout": _LAYOUT, **asdict(self)}))
        return document


@dataclass(frozen=True)
class Manifest:
    """A finished part: its plan, counts, and size (bytes) and SHA-256 of each file, by path within the part."""

    plan: Plan
    counts: Mapping[str, int]
    files: Mapping[str, tuple[int, str]]

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over plan and files."""
        return hashlib.sha256(json.dumps(self.document(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def document(self) -> dict[str, Any]:
        """As `manifest.json` holds it."""
        return {
            **self.plan.document(),
            "counts": dict(self.counts),
            "files": {n: list(f) for n, f in self.files.items()},
        }


class BuildProgress(Protocol):
    """Listens to a build: a terminal, a log, or `Silent`."""

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        """Begin a stage of `total` units, None if unknown; an earlier attempt has finished `done` of them."""
        ...

    def advance(self, amount: float = 1.0) -> None:
        """Count so many more units as done."""
        ...

    def note(self, text: str) -> None:
        """Keep a line: what was set aside, what was chosen and why."""
        ...


class Silent:
    """A `BuildProgress` that shows nothing."""

    def start(self, what: str, *, total: float | None, unit: str, done: float = 0.0) -> None:
        pass

    def advance(self, amount: float = 1.0) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Draft:
    """A part that is being built. What is written through it survives a kill; `finish` makes it a part."""

    def __init__(self, index: IndexFolder, plan: Plan) -> None:
        """Go on in the working folder if it is of the same plan, else begin it anew."""
        self.folder = index.path / f".building-{plan.part}"
        self._index = index
        self._plan = plan
        kept = self.folder / _SCRATCH / _PLAN
        if read_json(kept) != plan.document():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            write_json(kept, plan.document(), indent=None)

    @property
    def scratch(self) -> Path:
        """For what the finished part does not need: gone when it is finished, kept when the process is killed."""
        return self.folder / _SCRATCH

    @contextlib.contextmanager
    def writing(self, name: str, *, scratch: bool = False) -> Iterator[IO[bytes]]:
        """A file that is there whole or not at all, and on disk when the body is left."""
        target = (self.scratch if scratch else self.folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with writing(target) as file:
            yield file

    def holds(self, name: str, *, scratch: bool = False) -> bool:
        """Whether that file was written, now or by a process that was killed."""
        return ((self.scratch if scratch else self.folder) / name).exists()

    def finish(self, counts: Mapping[str, int]) -> Manifest:
        """Checksum all files and give the part its name, in place of an older one."""
        for left in self.folder.rglob("*.tmp"):  # by a process that was killed while it wrote
            left.unlink()
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and self.scratch not in path.parents)
        files = {str(path.relative_to(self.folder)): _facts(path) for path in paths}
        manifest = Manifest(self._plan, dict(counts), files)
        document = {**manifest.document(), "fingerprint": manifest.fingerprint}
        write_json(self.folder / _MANIFEST, document, indent=1)
        self._index.settle()
        return manifest


class IndexFolder:
    """An index on disk. Reading is safe while another process builds; building happens under `locked`."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is read."""
        self.path = path

    def part(self, part: Part) -> Path:
        """Where a part lies, or would."""
        return self.path / part

    @contextlib.contextmanager
    def locked(self, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Build alone: waits for a process that builds in the same folder. A killed process holds nothing.

        Args:
            waiting: called before it waits.

        Raises:
            DataError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / ".lock").touch()
        except OSError as error:
            raise DataError(f"{self.path} cannot hold an index ({error.strerror}); choose another folder") from error
        with lock(self.path / ".lock", waiting=waiting):
            self.settle()
            yield

    def manifest(self, part: Part) -> Manifest | None:
        """What a finished part says of itself, or None where there is none.

        Raises:
            DataError: it cannot be read, or is of another version of reasonrag.
        """
        path = self.part(part) / _MANIFEST
        if not path.exists():
            return None
        document = read_json(path) or {}
        try:
            if document["layout"] != _LAYOUT:
                raise DataError(
                    f"index {self.path}: {part} has layout {document['layout']}, this version reads {_LAYOUT}; "
                    "build it again"
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
        """The manifest of a part that has to be there.

        Raises:
            DataError: it is not there, or damaged.
        """
        manifest = self.manifest(part)
        if manifest is None:
            found = f"is an index of {', '.join(self.parts())}" if self.parts() else "is no index"
            unfinished = "; its build was not finished, run the same index build again" if self._drafts() else ""
            raise DataError(f"{self.path} {found}, and has no {part}{unfinished}")
        return manifest

    def parts(self) -> list[Part]:
        """The parts that are there."""
        return [part for part in PARTS if (self.part(part) / _MANIFEST).exists()]

    def begun(self) -> bool:
        """Whether an index is there, or the beginning of one; a lock alone may be that of a run."""
        return bool(self.parts() or self._drafts())

    def holds(self, plan: Plan) -> bool:
        """Whether that part is there, made by this very plan. A damaged manifest is not."""
        try:
            manifest = self.manifest(plan.part)
        except DataError:
            return False
        return manifest is not None and manifest.plan.document() == plan.document()

    def stale(self, part: Part, under: Manifest) -> bool:
        """Whether a part was made of another one than this; a damaged manifest does not say so."""
        try:
            manifest = self.manifest(part)
        except DataError:
            return False
        return manifest is not None and manifest.plan.made_of.get(under.plan.part) not in (None, under.fingerprint)

    def sound(self, plan: Plan) -> Manifest | None:
        """The part made by this very plan, where it is there and undamaged."""
        try:
            return self.verify(plan.part) if self.holds(plan) else None
        except DataError:
            return None

    def settle(self) -> None:
        """Give drafts that were finished their names; a process may have been killed in the middle of this."""
        for part in PARTS:
            new, here, old = self.path / f".building-{part}", self.part(part), self.path / f".old-{part}"
            if (new / _MANIFEST).exists():
                shutil.rmtree(new / _SCRATCH, ignore_errors=True)
                _discard(old)
                with contextlib.suppress(FileNotFoundError):
                    here.rename(old)
                new.rename(here)
                fsync_folder(self.path)
                self._remember(part, self.need(part))
            _discard(old)

    def remove(self, part: Part) -> None:
        """Take a part away."""
        _discard(self.part(part))

    def verify(self, part: Part, *, fully: bool = False) -> Manifest:
        """Whether a part's files are the ones that were written.

        A file is read to the end where it changed since it was last read so (by size, time of change and inode, so that
        a copy is read too), or was never read on this machine; otherwise a look at these is all it costs, so opening
        stays quick.

        Args:
            part: which one.
            fully: read every file to the end whatever its times say.

        Raises:
            DataError: a file is missing, cut or changed, or it was built over another part; one line says which.
        """
        manifest = self.need(part)
        for other in PARTS:
            under = self.manifest(other) if other in manifest.plan.made_of else None
            if under is not None and under.fingerprint != manifest.plan.made_of[other]:
                raise DataError(f"index {self.path}: {part} was built over other {other} than lie there; {_REBUILD}")
        known = {} if fully else self._known(part, manifest)
        for name, facts in manifest.files.items():
            path = self.part(part) / name
            try:
                if known.get(name) == _times(path):
                    continue
                size = path.stat().st_size
                problem = f"has {size} bytes, not {facts[0]}" if size != facts[0] else ""
                if not problem and _facts(path) != facts:
                    problem = "is damaged: its checksum differs"
            except FileNotFoundError:
                problem = "is missing"
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
            if problem:
                raise DataError(f"index {self.path}: {part}/{name} {problem}; {_REBUILD}")
        self._remember(part, manifest)
        return manifest

    def _known(self, part: Part, manifest: Manifest) -> dict[str, list[int]]:
        """Size, time and inode of the files that were read to the end before, where they were of this very manifest."""
        entry = (read_json(self.path / _VERIFIED) or {}).get(part)
        if not isinstance(entry, dict) or entry.get("fingerprint") != manifest.fingerprint:
            return {}
        files = entry.get("files")
        return files if isinstance(files, dict) else {}

    def _remember(self, part: Part, manifest: Manifest) -> None:
        files = {name: _times(self.part(part) / name) for name in manifest.files}
        if self._known(part, manifest) == files:
            return
        kept = read_json(self.path / _VERIFIED) or {}
        kept[part] = {"fingerprint": manifest.fingerprint, "files": files}
        with contextlib.suppress(OSError):  # a folder that cannot be written is read to the end at every opening
            write_json(self.path / _VERIFIED, kept, indent=None)

    def _drafts(self) -> list[Path]:
        return list(self.path.glob(".building-*"))


def _discard(path: Path) -> None:
    """Take a folder away; of a link, which may lead to another disk, the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _times(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _facts(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
