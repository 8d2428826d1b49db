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
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import dump, identity
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import fsync_folder

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
        claim_folder(path, "run", holds=(path / _JOURNAL).exists())
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
        """Write `run.json`, whole or not at all."""
        write_text(self.path / "run.json", json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_run(path: Path) -> tuple[Config, dict[str, Any]]:
    """Configuration and summary (`run.json`) of a finished run.

    Raises:
        RunError: there is no finished run in the folder.
    """
    try:
        summary = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} has no readable run.json: it is no run's folder, or build-tree has not finished"
        ) from error
    return load_config(file=path / "config.yaml"), summary


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def versions() -> dict[str, str]:
    """Installed versions of what can change a result."""
    found = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def claim_folder(path: Path, what: str, *, holds: bool, besides: Collection[str] = ()) -> None:
    """Create a folder, or see that `what` may be written into it.

    Args:
        path: of the folder.
        what: a run, a training, ...
        holds: whether `what` is in there already.
        besides: files that a beginning of `what` may have left.

    Raises:
        RunError: it holds other files, or cannot be written.
    """
    try:
        if path.exists() and not holds and any(p.name not in (".lock", *besides) for p in path.iterdir()):
            raise RunError(f"{path} holds other files and no {what}; choose a new folder for --out")
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").touch()
    except OSError as error:
        raise RunError(f"{path} cannot hold a {what} ({error.strerror}); choose another one for --out") from error


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the folder. The kernel lets go when the process ends, however it ends: there is no stale lock."""
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise RunError(f"{path.parent} is in use by another process ({owner}); wait for it or stop it") from error
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # the folder may be handed on: it is not to name this machine


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which settings differ, in words; empty where none does."""
    names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    return ", ".join(f"{n}: {before.get(n)!r} there, {now.get(n)!r} now" for n in names)
