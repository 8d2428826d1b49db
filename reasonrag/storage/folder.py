"""`Folder`: one process at a time writes it, the same command resumes it, and its files can be checked later.

Runs, training runs, indexes, reports and exports are such folders. A folder that can be resumed keeps a record: a JSON
file with the identity of the work (every setting and input that can change its result) and a checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.core.settings import Section, Tree, differences, dump, read_yaml
from reasonrag.storage.files import (
    RUNS,
    difference,
    lock,
    open_lock,
    require_json,
    short_hash,
    size_and_digest,
    write_json,
    write_text,
)

CONFIG = "config.yaml"
_LOCK = ".lock"
_CHECKSUM = "# checksum of all below: "  # a part of a YAML file can be valid YAML, too


class Folder:
    """A folder that holds one piece of work, such as a run or a report.

    Attributes:
        path: the folder, which need not exist yet.
        what: noun for its content, for messages.
    """

    def __init__(
        self, path: Path, what: str, *markers: str, ignore: Collection[str] = (), record: str | None = None
    ) -> None:
        """Describe a folder; nothing is written.

        Args:
            path: the folder.
            what: a run, a report, ...
            markers: patterns of files. If all of them match, the folder holds `what` already.
            ignore: names of files that an interrupted start may leave in a folder that is still free.
            record: path in the folder of the JSON file with the identity; None if the work cannot be resumed.
        """
        self.path = path
        self.what = what
        self._markers = markers
        self._ignored = {_LOCK, *ignore}
        self._record = None if record is None else path / record

    def is_usable(self) -> bool:
        """Return whether the folder is missing, empty, or holds `what` already."""
        if not self.path.exists() or all(entry.name in self._ignored for entry in self.path.iterdir()):
            return True
        if self._record is not None and self._record.exists():
            return True
        return bool(self._markers) and all(any(self.path.glob(marker)) for marker in self._markers)

    def claim(self) -> None:
        """Create the folder, or raise RunError if it holds other files or cannot be written."""
        try:
            os.fspath(self.path).encode()
            if not self.is_usable():
                raise RunError(f"{self.path} holds other files and no {self.what}; choose a new folder for --out")
            self.path.mkdir(parents=True, exist_ok=True)
            os.close(open_lock(self.path / _LOCK))
        except OSError as error:
            raise RunError(
                f"{self.path} cannot hold a {self.what} ({error.strerror}); choose another one for --out"
            ) from error
        except UnicodeEncodeError as error:  # Arrow cannot open such a file
            raise RunError(
                f"{os.fsencode(self.path)!r} cannot hold a {self.what} (it is not UTF-8); choose another one"
            ) from error

    @contextlib.contextmanager
    def locked(self, *, waiting: Callable[[], object] | None = None) -> Iterator[None]:
        """Claim the folder and keep other processes out while the block runs.

        `waiting` is called before waiting for another process; if it is None, that process is a RunError.
        """
        self.claim()
        with lock(self.path / _LOCK, waiting=waiting):
            yield

    def facts(self) -> dict[str, Any]:
        """Return the record: `identity`, and everything given to `note`. Empty before the first `note`.

        Raises:
            RunError: the record is damaged.
        """
        if self._record is None or not self._record.exists():
            return {}
        advice = "bring it back from a copy, or choose a new folder for --out"
        facts = require_json(self._record, advice)
        checksum = facts.pop("checksum", None)
        if checksum is None:  # version 0.1.0 wrote the identity of a training run alone
            return {"identity": facts}
        if checksum != short_hash(facts):
            raise RunError(f"{self._record} was changed since it was written; {advice}")
        return facts

    def note(self, **facts: Any) -> None:
        """Add facts to the record, in JSON; they are on disk when this returns."""
        before = self.facts()
        after = before | json.loads(json.dumps(facts))
        if self._record is not None and after != before:
            self._record.parent.mkdir(exist_ok=True)
            write_json(self._record, {**after, "checksum": short_hash(after)}, indent=1)

    def changes(self, identity: Mapping[str, Any], defaults: Section) -> str:
        """Return how the work in the folder differs from `identity`; "" if it does not, or none has begun.

        `defaults` has the values of settings that are younger than the folder.
        """
        held = self.facts().get("identity")
        return differences(held, identity, defaults) if held else ""

    def check_same(self, identity: Mapping[str, Any], defaults: Section) -> None:
        """Raise RunError, which names the settings that differ, if the folder holds work with another identity."""
        if changes := self.changes(identity, defaults):
            raise RunError(
                f"{self.path} holds a different {self.what} ({changes}); go back to that, or choose a new folder for "
                "--out"
            )


def first_usable(
    name: str, folder_at: Callable[[Path], Folder], identity: Mapping[str, Any], defaults: Section
) -> Path:
    """Return the folder of a command without `--out`: the first usable one of runs/NAME, runs/NAME-2, ...

    So the same command resumes its work, and another configuration gets another folder.
    """
    name = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:80] or "run"
    numbered = (RUNS / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    folders = (folder_at(path) for path in numbered)
    return next(f.path for f in folders if f.is_usable() and not f.changes(identity, defaults))


def describe(settings: Mapping[str, Any], content: Mapping[str, str]) -> dict[str, Any]:
    """Return an identity, equal to what JSON reads back: flat settings, and checksums of the inputs by name."""
    described = {**settings, **{f"content.{name}": checksum for name, checksum in sorted(content.items())}}
    return dict(json.loads(json.dumps(described)))


def checksums(folder: Path, files: Iterable[Path], *, sync: bool = False) -> dict[str, list[int | str]]:
    """Return size and SHA-256 of files by their path in a folder; with `sync`, once they are on disk."""
    return {file.relative_to(folder).as_posix(): list(size_and_digest(file, sync=sync)) for file in sorted(files)}


def damage(folder: Path, files: Mapping[str, Sequence[Any]], *, fully: bool = True) -> str:
    """Name a file that differs from its entry in `checksums`, and how; "" if none does. Only sizes unless `fully`."""
    for name, (size, digest) in files.items():
        if problem := difference(folder / name, size, digest if fully else ""):
            return f"{name} {problem}"
    return ""


def write_config(folder: Path, settings: Section) -> None:
    """Write `config.yaml`: the resolved settings with their checksum."""
    text = dump(settings)
    write_text(folder / CONFIG, f"{_CHECKSUM}{short_hash(text)}\n{text}")


def read_config(folder: Path, command: str) -> Tree:
    """Return the settings in `config.yaml`; raise RunError if they were changed, with the `command` that mends them."""
    file = folder / CONFIG
    tree, (first, _, text) = read_yaml(file), file.read_text("utf-8").partition("\n")
    if not tree or (first.startswith(_CHECKSUM) and first != _CHECKSUM + short_hash(text)):
        problem = "was cut or changed since it was written" if tree else "is empty, as after a power cut"
        raise RunError(f"{file} {problem}; {command} writes it again")
    return tree
