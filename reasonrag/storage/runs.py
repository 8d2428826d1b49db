"""A run's folder: its journal, its tables, and its shards.

RUN/
├── config.yaml        the resolved configuration
├── identity.json      what decides the results of the run, and how its shards are doing
├── journal.sqlite     every model call and finished tree
├── trees/*.parquet    one row per node
├── pairs/{train,test}-*.parquet
├── run.json           counts, calls, tokens, cost, failures, versions
└── shards/I-of-S/     the same of each shard, if the run is built in shards; the tables above are links to theirs
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import COMMIT, Tree, identity, read_yaml
from reasonrag.storage.files import read_json, short_hash
from reasonrag.storage.folder import CONFIG, Folder, describe, first_usable, read_config, write_config
from reasonrag.storage.journal import Journal
from reasonrag.storage.shards import WHOLE, Shard

_JOURNAL = "journal.sqlite"
_LEAST_BYTES = 512  # of a SQLite file; it reads a shorter one as an empty one
_VERSIONS = ("reasonrag", "bm25s", "datasets", "pyarrow", "torch", "transformers", "trl", "vllm")


class RunFolder(Folder):
    """The folder of one run, or of one of its shards.

    Attributes:
        begun: whether the run, in this shard or another one, has begun before.
        journal: its calls and trees, while the folder is open.
    """

    journal: Journal

    def __init__(
        self,
        path: Path,
        config: Config,
        content: Mapping[str, str],
        *,
        varying: Collection[str] = (),
        shard: Shard = WHOLE,
    ) -> None:
        """Describe the folder of a run; nothing is written.

        Args:
            path: the folder of the run.
            config: the resolved configuration. Settings that cannot change a result may differ from the last time.
            content: names and checksums of the inputs (questions, corpus, prompts, models).
            varying: settings that may differ within the folder, such as the ones that an evaluation sweeps.
            shard: the part of the run, in its own folder below `path`.
        """
        super().__init__(shard.folder(path), "run", _JOURNAL, ignore=("shards",), record="identity.json")
        self.config, self.content, self.varying, self.shard = config, content, varying, shard
        settings = {name: value for name, value in identity(config).items() if name not in varying}
        self.identity = describe(settings, content)
        self.config_hash = short_hash({n: value for n, value in self.identity.items() if not n.endswith(COMMIT)})
        self.begun = False
        self._run = path

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
        """Create the folder and lock it, or reopen it to resume the same run; arguments as above and in `locked`.

        Raises:
            RunError: another process uses the folder, or it holds other files or another run.
        """
        folder = cls(path, config, content, varying=varying, shard=shard)
        if shard != WHOLE:  # before a folder of the shard exists
            with folder.whole() as run:
                run.check_shards(shard.of)
                folder.begun = run.begun
        with folder.locked(waiting=waiting):
            folder.check_same(folder.identity, Config())
            has_begun, file = "identity" in folder.facts(), folder.path / _JOURNAL
            if has_begun and not (file.exists() and file.stat().st_size >= _LEAST_BYTES):
                raise RunError(
                    f"{file} is missing or empty, but {folder.path} holds a run; bring the journal back from a copy, "
                    "or choose a new folder for --out"
                )
            if has_begun:  # with a commit of the Hub that was not known then
                folder.note(identity=folder.identity)
            folder.begun = folder.begun or has_begun
            with contextlib.closing(Journal(file)) as folder.journal:
                write_config(folder.path, config)
                yield folder

    @staticmethod
    def begun_with(path: Path) -> Tree:
        """Return the settings of the run that has begun in a folder; an empty tree if none has."""
        has_begun = "identity" in RunFolder(path, Config(), {}).facts()
        return read_yaml(path / CONFIG) if has_begun else {}

    @staticmethod
    def unnamed(name: str, config: Config, content: Mapping[str, str]) -> Path:
        """Return the folder of a run without `--out`; the other arguments are those of `open`."""
        described = RunFolder(Path(), config, content).identity
        return first_usable(name, lambda path: RunFolder(path, config, content), described, Config())

    def facts(self) -> dict[str, Any]:
        """Return the record, as `Folder.facts`; of a run of version 0.1.0, what its journal holds."""
        if facts := super().facts():
            return facts
        facts = _facts_in_journal(self.path / _JOURNAL)
        if not facts.pop("bound", False):
            facts.pop("identity", None)
        return facts

    def whole(self) -> contextlib.AbstractContextManager[RunFolder]:
        """Open the folder of the run that this shard is a part of, when no other shard has it open."""
        return RunFolder.open(self._run, self.config, self.content, varying=self.varying, waiting=lambda: None)

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
        self.note(identity=self.identity, shards=shards)

    def check_shards(self, shards: int) -> None:
        """Raise RunError if the folder is used by a run in another number of shards."""
        facts = self.facts()
        before = facts.get("shards", 1 if "identity" in facts else shards)
        if before != shards:
            held, wanted = ("in one piece" if n == 1 else f"in {n} shards" for n in (before, shards))
            raise RunError(
                f"{self.path} holds a run that is built {held}, not {wanted}; go on with that, or choose a new folder "
                "for --out"
            )

    def note_shard(self, shard: Shard, note: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Keep a note about a shard of this run; return the notes about all of them, {} if a shard has none."""
        self.note(**{f"shard {shard.number}": note})
        return self.shard_notes()

    def shard_notes(self) -> list[dict[str, Any]]:
        """Return the notes about all shards of this run, {} if a shard has none."""
        facts = self.facts()
        return [facts.get(f"shard {number}", {}) for number in range(facts.get("shards", 0))]

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds of a process to the total of the run."""
        self.note(seconds=self.facts().get("seconds", 0.0) + seconds)


def _facts_in_journal(journal: Path) -> dict[str, Any]:
    """Return the facts about a run that a journal of version 0.1.0 holds; empty if it cannot be read.

    Nothing is written and no commit waited for, as another process may be at work on the file.
    """
    address = f"{journal.absolute().as_uri()}?mode=rw"
    with (
        contextlib.suppress(sqlite3.Error, ValueError),
        contextlib.closing(sqlite3.connect(address, uri=True)) as connection,
    ):
        rows = connection.execute("SELECT key, value FROM meta WHERE key != 'checksum'")
        return {key: json.loads(value) for key, value in rows}
    return {}


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
    read_config(path, "the same build-tree command")
    return load_config(file=path / CONFIG, overrides=overrides), summary


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that can change a result."""
    installed = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
