"""A run's folder: its lock, its identity, and its files.

RUN/
├── config.yaml        the resolved configuration
├── journal.sqlite     every model call and finished tree
├── trees/*.parquet    one row per node
├── pairs/{train,test}-*.parquet
├── run.json           counts, calls, tokens, cost, failures, versions
└── shards/I-of-S/     the same of each shard, if the run is built in shards; the tables above are links to theirs
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import COMMIT, Section, Tree, differences, dump, identity, read_yaml
from reasonrag.storage.files import claim_folder, is_empty, lock, read_json, short_hash, unnamed_folder, write_text
from reasonrag.storage.journal import Journal
from reasonrag.storage.shards import WHOLE, Shard

_JOURNAL = "journal.sqlite"
_CHECKSUM = "# checksum of all below: "  # a part of a YAML file can be one, too
_VERSIONS = ("reasonrag", "bm25s", "datasets", "pyarrow", "torch", "transformers", "trl", "vllm")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run, or of one of its shards, locked by this process."""

    path: Path
    journal: Journal
    config: Config
    content: Mapping[str, str]
    config_hash: str
    shard: Shard = WHOLE
    varying: Collection[str] = ()
    begun: bool = False  # whether the run, in this shard or another one, has begun before

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        path: Path,
        config: Config,
        content: Mapping[str, str],
        *,
        varying: Collection[str] = (),
        shard: Shard = WHOLE,
        waiting: Callable[[], object] | None = None,
    ) -> Iterator[RunFolder]:
        """Create the folder, or reopen it to resume the same run.

        Args:
            path: the folder of the run.
            config: the resolved configuration. Settings that cannot change a result may differ from the last time.
            content: names and checksums of the inputs (questions, corpus, prompts, models).
            varying: settings that may differ within the folder, such as the ones that an evaluation sweeps.
            shard: the part of the run to open, in its own folder below `path`.
            waiting: called before waiting for another process that uses the folder; if None, do not wait.

        Raises:
            RunError: another process uses the folder, or it holds other files or another run.
        """
        begun = False
        if shard != WHOLE:  # before there is a folder of the shard
            with cls.open(path, config, content, varying=varying, waiting=lambda: None) as run:
                run.check_shards(shard.of)
                begun = run.begun
        described = _described(config, content, varying)
        for folder in dict.fromkeys((path, shard.folder(path))):
            claim_folder(folder, "run", already_ours=_usable(folder))
        path = shard.folder(path)
        with lock(path / ".lock", waiting=waiting), contextlib.closing(Journal(path / _JOURNAL)) as journal:
            before = journal.meta("identity")
            if before is None and (path / "config.yaml").exists():  # which is written after it
                raise RunError(
                    f"{journal.path} is empty, but {path} holds a run; bring the journal back from a copy, or choose a "
                    "new folder for --out"
                )
            changes = "" if before is None else differences(before, described, Config())
            if changes and journal.meta("bound"):
                raise RunError(
                    f"{path} holds a run of another configuration ({changes}); "
                    "go back to that, or choose a new folder for --out"
                )
            journal.put_meta("identity", described)
            write_config(path, config)
            hashed = {name: value for name, value in described.items() if not name.endswith(COMMIT)}
            begun = begun or bool(journal.meta("bound"))
            yield cls(path, journal, config, content, short_hash(hashed), shard, varying, begun)

    @staticmethod
    def begun_with(path: Path) -> Tree:
        """Return the settings of the run that has begun in a folder; an empty tree if none has."""
        return read_yaml(path / "config.yaml") if Journal.peek(path / _JOURNAL, "bound") else {}

    @staticmethod
    def unnamed(name: str, config: Config, content: Mapping[str, str]) -> Path:
        """Return the folder of a run without `--out`; the arguments but `name` are those of `open`."""
        described = _described(config, content)

        def holds_same(folder: Path) -> bool:
            journal = folder / _JOURNAL
            same = not differences(Journal.peek(journal, "identity") or {}, described, Config())
            return journal.is_file() and (same or not Journal.peek(journal, "bound"))

        return unnamed_folder(name, holds_same)

    def whole(self) -> contextlib.AbstractContextManager[RunFolder]:
        """Open the folder of the run that this shard is a part of, when no other shard has it open."""
        run = self.path.parent.parent
        return RunFolder.open(run, self.config, self.content, varying=self.varying, waiting=lambda: None)

    def bind(self) -> None:
        """Mark the folder as used by this run. A preview, or a failed start, leaves it unmarked.

        Raises:
            RunError: the folder of a shard's run holds another run, or one that is cut into another number of shards.
        """
        if self.shard.of > 1:
            with self.whole() as run:
                run.bind_shards(self.shard.of)
                run.note_shard(self.shard, {})  # until it has finished again
        self.bind_shards(1)

    def bind_shards(self, shards: int) -> None:
        """Mark the folder as used by this run, in this number of shards; raise as `check_shards`."""
        self.check_shards(shards)
        self.journal.put_meta("shards", shards)
        self.journal.put_meta("bound", True)

    def check_shards(self, shards: int) -> None:
        """Raise RunError if the folder is used by a run in another number of shards."""
        before = self.journal.meta("shards") or (1 if self.journal.meta("bound") else shards)
        if before != shards:
            held, asked = ("in one piece" if n == 1 else f"in {n} shards" for n in (before, shards))
            raise RunError(
                f"{self.path} holds a run that is built {held}, not {asked}; go on with that, or choose a new folder "
                "for --out"
            )

    def note_shard(self, shard: Shard, note: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Keep a note about a shard of this run; return the notes about all of them, {} where there is none."""
        self.journal.put_meta(f"shard {shard.number}", note)
        return self.shard_notes()

    def shard_notes(self) -> list[dict[str, Any]]:
        """Return the notes about all shards of this run, {} where there is none."""
        return [self.journal.meta(f"shard {number}") or {} for number in range(self.journal.meta("shards") or 0)]

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds of a process to those that the run has taken."""
        self.journal.put_meta("seconds", (self.journal.meta("seconds") or 0.0) + seconds)


def _usable(folder: Path) -> bool:
    """Return whether a run may be in this folder. The journal comes first and last: another shard may be making it."""
    return not folder.is_dir() or is_empty(folder, ignore=("shards",)) or (folder / _JOURNAL).exists()


def _described(config: Config, content: Mapping[str, str], varying: Collection[str] = ()) -> dict[str, Any]:
    """Return the identity of a run as the journal holds it."""
    described = {name: value for name, value in identity(config).items() if name not in varying}
    described |= {f"content.{name}": value for name, value in sorted(content.items())}
    return dict(json.loads(json.dumps(described)))


def read_run(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Config, dict[str, Any]]:
    """Return the configuration and the summary (`run.json`) of a finished run.

    Args:
        path: the folder of the run.
        overrides: dotted names of settings that differ from the run's.

    Raises:
        RunError: the folder holds no finished run, or its configuration is not as it was written.
    """
    summary = read_json(path / "run.json")
    if summary is None:
        shards = list(path.glob("shards/*-of-*"))
        finished = sum((shard / "run.json").exists() for shard in shards)
        of = f" ({finished} of {shards[0].name.partition('-of-')[2]} shards have)" if shards else ""
        raise RunError(
            f"{path} has no readable run.json: it is not the folder of a run, or build-tree has not finished{of}, or "
            "it is damaged; the same build-tree command finishes it"
        )
    file = path / "config.yaml"
    read_written(file, "the same build-tree command")
    return load_config(file=file, overrides=overrides), summary


def write_config(folder: Path, settings: Section) -> None:
    """Write `config.yaml`: the resolved settings with their checksum."""
    text = dump(settings)
    write_text(folder / "config.yaml", f"{_CHECKSUM}{short_hash(text)}\n{text}")


def read_written(file: Path, command: str) -> Tree:
    """Return the settings in a `config.yaml`; raise RunError if they are not as written, which `command` mends."""
    tree, (first, _, text) = read_yaml(file), file.read_text("utf-8").partition("\n")
    if not tree or (first.startswith(_CHECKSUM) and first != _CHECKSUM + short_hash(text)):
        found = "was cut or changed since it was written" if tree else "is empty, as after a power cut"
        raise RunError(f"{file} {found}; {command} writes it again")
    return tree


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that can change a result."""
    installed = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
