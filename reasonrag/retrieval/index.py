"""An index: its settings, and a folder of parts. Each part exists completely or not at all, and records its inputs.

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
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

from pydantic import ByteSize, field_validator, model_validator

from reasonrag.core.errors import DataError
from reasonrag.core.settings import Section, execution, refuse_links, setting
from reasonrag.storage.files import damage, digests, read_json, short_hash, size_and_digest, write_json, writing
from reasonrag.storage.folder import Folder

Part = Literal["passages", "bm25", "embeddings", "vectors"]
PARTS: tuple[Part, ...] = get_args(Part)

_LAYOUT = 1  # increase it when the content of a part changes
_MANIFEST, _VERIFIED, _PLAN, _SCRATCH = "manifest.json", ".verified.json", "plan.json", "scratch"
_REBUILD = "build the index again, or copy it again"


class PassagesConfig(Section):
    """Which rows become passages.

    Rows that are not JSON, or have no id or no contents, are set aside, and so are
    passages with an earlier id. A passage that is too long is split between words:
    the first piece keeps the id, the others are `ID#2`, `ID#3`, ... Each piece begins
    with the title, which is the first of several lines and has at most 30 words.
    """

    # The order of these fields is their order in the manifest of an index.
    strict: bool = setting(
        False, "refuse a corpus with unusable rows instead of setting them aside", "--strict/--no-strict"
    )
    max_words: int = setting(1000, "maximum words of a passage; longer ones are split", "--max-words", ge=10)
    chunk_words: int | None = setting(None, "split every text into passages of this many words", "--chunk-words", ge=10)


class BM25Config(Section):
    """How BM25 cuts texts into words and weighs them. A title is the first of several lines."""

    # The order of these fields is their order in the manifest of an index.
    stemmer: str | None = setting("english", "stemmer for words: a Snowball language, or none", "--stemmer")
    stopwords: str | None = setting("english", "words to ignore: a list that bm25s knows, or none", "--stopwords")
    k1: float = setting(1.2, "BM25 k1: how slowly repeated words saturate", "--k1", ge=0)
    b: float = setting(0.75, "BM25 b: how much long passages are penalised", "--b", ge=0, le=1)
    title_weight: int = setting(1, "how often each word of the title counts", "--title-weight", ge=1, le=100)

    @field_validator("stemmer", "stopwords", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value


class EncoderConfig(Section):
    """Which model encodes passages and queries. A field that is not given comes from the model's files.

    Stored vectors are float32, whatever the dtype of the weights.
    """

    name: str | None = setting(
        None, "sentence-transformers model that encodes passages and queries: a Hub id or a folder", "--encoder"
    )
    query_prefix: str | None = setting(None, "text in front of every query (default: the model's)")
    passage_prefix: str | None = setting(None, "text in front of every passage (default: the model's)")
    max_tokens: int | None = setting(
        None, "maximum tokens of a text; the rest is cut off (default: the model's limit)", ge=8
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "dtype of the encoder's weights: float32, bfloat16 or float16", "--dtype"
    )
    batch_size: int = setting(64, "passages per batch of the encoder", "--encode-batch", ge=1)
    device: str | None = execution(None, "device of the encoder, for example cpu, cuda or cuda:1", "--device")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")


class VectorsConfig(Section):
    """Which FAISS index searches the vectors."""

    kind: Literal["auto", "flat", "ivf-sq8", "ivf-pq"] = setting(
        "auto", "type of FAISS index; auto chooses by the number of vectors and the memory", "--vectors"
    )


class IndexConfig(Section):
    """Everything that `index build` depends on."""

    corpus: str | None = execution(
        None,
        "corpus to search: a file of JSONL(.gz), CSV or Parquet, with id and contents. `index build` "
        "also takes a folder of them or of texts, a known name (wiki18, ...), or hub:OWNER/NAME:FILE",
        "--corpus",
    )
    kind: tuple[Literal["bm25", "dense"], ...] = execution(
        ("bm25",), "what to build: bm25, dense, or both", "--kind", min_length=1
    )
    max_memory: ByteSize | None = execution(
        None, "maximum memory of the build, such as 8G (default: half of all)", "--max-memory", ge=256 << 20, le=1 << 60
    )
    passages: PassagesConfig = PassagesConfig()
    bm25: BM25Config = BM25Config()
    encoder: EncoderConfig = EncoderConfig()
    vectors: VectorsConfig = VectorsConfig()

    @model_validator(mode="after")
    def _encoder_is_named(self) -> IndexConfig:
        if "dense" in self.kind and self.encoder.name is None:
            raise ValueError(
                "a dense index needs a model: add --encoder, for example intfloat/e5-base-v2, BAAI/bge-base-en-v1.5, "
                "Qwen/Qwen3-Embedding-0.6B or sentence-transformers/all-MiniLM-L6-v2"
            )
        if "dense" not in self.kind and self.encoder.name is not None:
            raise ValueError("an encoder is given, but no dense index is asked for; add --kind dense")
        return self

    @property
    def max_bytes(self) -> int:
        """The memory limit of the build in bytes."""
        return self.max_memory or max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 256 << 20)


def show_size(size: float) -> str:
    """Format bytes with a binary unit.

    >>> show_size(1610612736), show_size(900)
    ('1.5 GiB', '900 B')
    """
    return ByteSize(size).human_readable(separator=" ")


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
        mine, others = self.document(), other.document()
        for document in (mine, others):
            document["settings"].pop("encoder", None)  # `made_of` has the checksum of what counts in it
        return mine == others


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
        return {**self.plan.document(), "counts": dict(self.counts), "files": dict(self.files)}


class IndexFolder:
    """An index on disk. Reading is safe while another process builds; building happens under `locked`."""

    def __init__(self, path: Path, setting: str = "--out") -> None:
        self.path = path
        unfinished = [f".building-{part}" for part in PARTS]
        self._folder = Folder(path, "search index", f"*/{_MANIFEST}", ignore=[*unfinished, _VERIFIED])
        self._folder.setting = setting

    def part(self, part: Part) -> Path:
        """Return the folder of a part, which need not exist."""
        return self.path / part

    def parts(self) -> list[Part]:
        return [part for part in PARTS if (self.part(part) / _MANIFEST).exists()]

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
            # It is computed over all other fields, so a flipped bit in any of them shows.
            if document["fingerprint"] != manifest.fingerprint:
                raise ValueError
            return manifest
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError(f"index {self.path}: {part}/{_MANIFEST} is damaged; {_REBUILD}") from None

    def need(self, part: Part) -> Manifest:
        """Read the manifest of a part; raise DataError if the part is missing, or its manifest is damaged."""
        if manifest := self.manifest(part):
            return manifest
        content = f"is an index of {', '.join(self.parts())}" if self.parts() else "is not an index"
        advice = "give the folder that `index build` wrote, or build it"
        if any(self.path.glob(".building-*")):
            advice = "its build was not finished, run the same index build again"
        raise DataError(f"{self.path} {content}, and has no {part}; {advice}")

    def verify(self, part: Part, *, fully: bool = False) -> Manifest:
        """Check that a part's files are the ones that were written.

        They are checksummed only if the size, modification time or
        inode of one changed since the last checksum, or if `fully` is
        set: an index of Wikipedia has 80 GB, and opens in a second.

        Raises:
            DataError: the part is missing or damaged, or it was built over another version of a part.
        """
        refuse_links(self.path)
        manifest = self.need(part)
        for other in PARTS:
            under = self.manifest(other) if other in manifest.plan.made_of else None
            if under is not None and under.fingerprint != manifest.plan.made_of[other]:
                raise DataError(
                    f"index {self.path}: {part} was built over other {other} than the folder holds; {_REBUILD}"
                )
        if fully or (read_json(self.path / _VERIFIED) or {}).get(part) != self._stamps(part, manifest):
            if problem := damage(self.part(part), manifest.files):
                raise DataError(f"index {self.path}: {part}/{problem}; {_REBUILD}")
            self._remember(part, manifest)
        return manifest

    def sound(self, plan: Plan) -> Manifest | None:
        """Return the manifest of the part with this plan; None if it is missing or damaged."""
        with contextlib.suppress(DataError):
            if self.need(plan.part).plan.same(plan):
                return self.verify(plan.part)
        return None

    def settle(self) -> None:
        """Rename finished drafts to parts. A process may have been killed at any point of this."""
        for part in PARTS:
            draft = self.path / f".building-{part}"
            # The manifest is written last, so a draft that has one is complete.
            if (draft / _MANIFEST).exists():
                shutil.rmtree(draft / _SCRATCH, ignore_errors=True)
                self.remove(part)
                draft.rename(self.part(part))
                self._remember(part, self.need(part))

    def remove(self, part: Part) -> None:
        shutil.rmtree(self.part(part), ignore_errors=True)

    def _stamps(self, part: Part, manifest: Manifest) -> list[Any]:
        """Return the fingerprint of a part; and size, modification time and inode of each of its files."""
        stamps: list[Any] = [manifest.fingerprint]
        for name in manifest.files:
            with contextlib.suppress(OSError):  # missing: then the list is too short
                stat = (self.part(part) / name).stat()
                stamps.append([stat.st_size, stat.st_mtime_ns, stat.st_ino])
        return stamps

    def _remember(self, part: Part, manifest: Manifest) -> None:
        document = read_json(self.path / _VERIFIED) or {}
        with contextlib.suppress(OSError):  # a read-only folder is checksummed at every opening
            write_json(self.path / _VERIFIED, {**document, part: self._stamps(part, manifest)}, indent=None)


class Draft:
    """A part that is being built. Files written through it survive a kill; `finish` makes it a part of the index."""

    def __init__(self, index: IndexFolder, plan: Plan) -> None:
        """Resume in the working folder if it has the same plan, else clear it."""
        self.folder = index.path / f".building-{plan.part}"
        self.scratch = self.folder / _SCRATCH  # for files that the finished part does not need
        self.plan = plan
        self._index = index
        # Files of another corpus, encoder or setting would end up in this part.
        if read_json(self.scratch / _PLAN) != plan.document():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            write_json(self.scratch / _PLAN, plan.document(), indent=None)
        for partial_file in self.folder.rglob("*.tmp"):  # a killed process left them
            partial_file.unlink()

    @contextlib.contextmanager
    def writing(self, name: str, *, scratch: bool = False) -> Iterator[IO[bytes]]:
        """Open a file that exists completely or not at all, and is on disk when the block ends."""
        target = (self.scratch if scratch else self.folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with writing(target) as file:
            yield file
        write_json(self._record(name), _digest(target))

    def save(self, name: str, values: Any, *, scratch: bool = False) -> None:
        """Write the bytes that `np.save` writes for an array; its error on a full disk does not name the reason."""
        from numpy.lib import format

        with self.writing(name, scratch=scratch) as file:
            format.write_array_header_1_0(file, format.header_data_from_array_1_0(values))
            file.write(values.data)

    def holds(self, name: str, *, scratch: bool = False) -> bool:
        """Return whether that file was written, by this process or by one that was killed, and is as it was written."""
        target = (self.scratch if scratch else self.folder) / name
        return target.exists() and read_json(self._record(name)) == _digest(target)

    def _record(self, name: str) -> Path:
        """Return the file with the digest of a file as it was written."""
        return self.scratch / f"{name.replace('/', '-')}.digest"

    def finish(self, counts: Mapping[str, int]) -> Manifest:
        """Checksum all files and rename the working folder to the part, in place of an older one."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and self.scratch not in path.parents]
        files = {name: (int(size), str(digest)) for name, (size, digest) in digests(self.folder, paths).items()}
        manifest = Manifest(self.plan, dict(counts), files)
        write_json(self.folder / _MANIFEST, {**manifest.document(), "fingerprint": manifest.fingerprint}, indent=1)
        self._index.settle()
        return manifest


def _digest(path: Path) -> dict[str, str]:
    return {"sha256": size_and_digest(path)[1]}
