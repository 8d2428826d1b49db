"""A run's folder: who may write it, what it depends on, what came out.

RUN/
├── config.yaml        the resolved configuration
├── journal.sqlite     every paid call and finished tree
├── trees/*.parquet    one row a node
├── pairs/{train,test}-*.parquet
└── run.json           counts, calls, tokens, cost, failures, versions
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import differences, dump, identity
from reasonrag.storage.files import claim_folder, lock, read_json, write_json, write_text
from reasonrag.storage.journal import Journal

_JOURNAL = "journal.sqlite"
_VERSIONS = ("reasonrag", "bm25s", "datasets", "pyarrow", "torch", "transformers", "trl", "vllm")


class RunFolder:
    """A folder that this process alone writes to."""

    def __init__(self, path: Path, journal: Journal, config_hash: str) -> None:
        self.path = path
        self.journal = journal
        self.config_hash = config_hash

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: Path, config: Config, content: Mapping[str, str], *, varying: Collection[str] = ()
    ) -> Iterator[RunFolder]:
        """Create the folder, or go on in it if it is of the same run.

        Args:
            path: of the folder.
            config: the resolved configuration; what cannot change a result may differ from last time.
            content: names and checksums of what the configuration points at (questions, corpus, prompts, models).
            varying: settings that may differ within the folder, such as those that an evaluation sweeps.

        Raises:
            RunError: another process writes there, it is not a run's folder, or the run in it is another one.
        """
        described = {name: value for name, value in identity(config).items() if name not in varying}
        described |= {f"content.{name}": value for name, value in sorted(content.items())}
        claim_folder(path, "run", already_ours=(path / _JOURNAL).exists())
        with lock(path / ".lock"), contextlib.closing(Journal(path / _JOURNAL)) as journal:
            before = journal.meta("identity")
            changes = "" if before is None else differences(before, described)
            if changes and journal.meta("bound"):
                raise RunError(
                    f"{path} holds a run of another configuration ({changes}); "
                    "go back to that, or choose a new folder for --out"
                )
            journal.put_meta("identity", described)
            write_text(path / "config.yaml", dump(config))
            digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
            yield cls(path, journal, digest[:16])

    def bind(self) -> None:
        """From now on the folder is this run's. A preview, or a try with a model that is not there, does not bind."""
        self.journal.put_meta("bound", True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `run.json`."""
        write_json(self.path / "run.json", summary)


def read_run(path: Path) -> tuple[Config, dict[str, Any]]:
    """Configuration and summary (`run.json`) of a finished run.

    Raises:
        RunError: there is no finished run in the folder.
    """
    summary = read_json(path / "run.json")
    if summary is None:
        raise RunError(
            f"{path} has no readable run.json: it is not the folder of a run, or build-tree has not finished"
        )
    return load_config(file=path / "config.yaml"), summary


def versions() -> dict[str, str]:
    """Installed versions of what can change a result."""
    found = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
