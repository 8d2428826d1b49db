"""`Folder`: one process at a time writes it, the same command resumes it, and its files can be checked later.

Runs, training runs, indexes, reports and exports are such folders. A folder that can be resumed keeps a
record: a JSON file with the identity of the work (every setting and input that can change its result) and
a checksum. A run is a `RunFolder`, and may be built in shards:

RUN/
├── config.yaml        the resolved configuration
├── identity.json      the record, with a note about each shard
├── journal.sqlite     every model call and finished tree
├── trees/*.parquet    one row per node
├── pairs/{train,test}-*.parquet
├── run.json           counts, calls, tokens, cost, failures, versions
└── shards/I-of-S/     the same of each shard; the tables above are then links to theirs
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from reasonrag import __version__
from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.settings import COMMIT, Section, differences, dump, identity, named_path, read_yaml, refuse_links
from reasonrag.core.text import map_texts
from reasonrag.core.types import WHOLE, Shard
from reasonrag.storage.files import RUNS, lock, open_lock, read_json, require_json, short_hash, write_json, write_text
from reasonrag.storage.journal import Journal

log = structlog.get_logger()

CONFIG = "config.yaml"
_LOCK = ".lock"
_CHECKSUM = "# checksum of all below: "
_JOURNAL = "journal.sqlite"
_LEAST_BYTES = 512  # of a SQLite file; it reads a shorter one as an empty one
_RECEIPT = ".finished"
_HIDDEN = re.compile(r"(^|/)\.[^/]")
_NO_RESULT = re.compile(r"^(checkpoints|report)/|(^|/)\.[^/]")  # what may come and go in a finished folder
# Only warnings: web search finds something else each day, and users fix bugs in their plug-ins.
_CHANGED = {"retriever": "the retrieval server finds other passages", "code": "the plug-ins have other code"}
_VERSIONS = ("reasonrag", "bm25s", "datasets", "pyarrow", "torch", "transformers", "trl", "vllm")


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
            record: path in the folder of the JSON file with the
                identity; None if the work cannot be resumed.
        """
        self.path = path
        self.what = what
        self.setting = "--out"  # that names the folder
        self._markers = markers
        self._ignored = {_LOCK, *ignore}
        self._record = None if record is None else path / record

    def is_usable(self) -> bool:
        """Return whether the folder is missing, empty, or holds `what` already."""
        is_free = not self.path.exists() or all(entry.name in self._ignored for entry in self.path.iterdir())
        has_record = self._record is not None and self._record.exists()
        has_markers = bool(self._markers) and all(any(self.path.glob(marker)) for marker in self._markers)
        return is_free or has_record or has_markers

    def claim(self) -> None:
        """Create the folder, or raise RunError if it holds other files or cannot be written."""
        try:
            if not self.is_usable():
                raise RunError(f"{self.path} holds other files and no {self.what}; choose a new folder for --out")
            self.path.mkdir(parents=True, exist_ok=True)
            os.close(open_lock(self.path / _LOCK))
            refuse_links(self.path)
            str(self.path.resolve()).encode()
        except UnicodeEncodeError:
            raise RunError(f"{self.path}: its path is not UTF-8, and Arrow opens no such file; rename it") from None
        except OSError as error:
            problem = f"{self.path} cannot hold a {self.what} ({error.strerror})"
            raise RunError(f"{problem}; choose another one for {self.setting}") from error

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
        if facts.pop("checksum", None) != short_hash(facts):
            raise RunError(f"{self._record} was changed since it was written; {advice}")
        return facts

    def note(self, **facts: Any) -> None:
        """Add facts to the record, in JSON; they are on disk when this returns."""
        before = self.facts()
        # Through JSON, so that a tuple equals the list that a later process reads.
        after = before | json.loads(json.dumps(facts))
        if self._record is not None and after != before:
            self._record.parent.mkdir(exist_ok=True)
            write_json(self._record, {**after, "checksum": short_hash(after)}, indent=1)

    def changes(self, identity: Mapping[str, Any], defaults: Section) -> str:
        """Return how the work in the folder differs from `identity`; "" if it does not, or none has begun.

        `defaults` has the values of settings that are younger than the folder.
        """
        recorded = self.facts().get("identity")
        return differences(recorded, identity, defaults) if recorded else ""

    def check_same(self, identity: Mapping[str, Any], defaults: Section) -> None:
        """Raise RunError, which names the settings that differ, if the folder holds work with another identity."""
        if changes := self.changes(identity, defaults):
            problem = f"{self.path} holds a different {self.what} ({changes})"
            raise RunError(f"{problem}; go back to that, or choose a new folder for --out")

    def keep_served(self, served: Mapping[str, Mapping[str, str]]) -> None:
        """Note what each server serves, by role. `pipeline.parts.served_by` compares models with these notes."""
        before = self.facts().get("served", {})
        for role, changed in _CHANGED.items():
            if before.get(role, now := served.get(role)) != now and now:
                log.warning(f"{changed} than when {self.path} was begun; finished work is kept")
        if served:
            self.note(served={**before, **served})


def first_usable(
    name: str, folder_at: Callable[[Path], Folder], identity: Mapping[str, Any], defaults: Section
) -> Path:
    """Return the folder of a command without `--out`: the first usable one of runs/NAME, runs/NAME-2, ...

    So the same command resumes its work, and another configuration gets another folder.
    """
    # A data set's name may be a path or a Hub name, with signs that a folder's name should not have.
    name = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:80] or "run"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (folder_at(RUNS / each) for each in names)
    return next(folder.path for folder in folders if folder.is_usable() and not folder.changes(identity, defaults))


def describe(settings: Mapping[str, Any], content: Mapping[str, str]) -> dict[str, Any]:
    """Return an identity, equal to what JSON reads back: flat settings, and checksums of the inputs by name."""
    named = {f"content.{name}": checksum for name, checksum in sorted(content.items())}
    return dict(json.loads(json.dumps({**settings, **named})))


def finished(out: Path | None, *command: Any) -> Path | None:
    """Return the folder that a command has finished, if it would find everything as it left it; else None.

    So a command that is repeated loads no model and reads no table. Sizes and times of files are compared,
    not their contents: where one differs, the command does its work, which mends or refuses the folder.

    Args:
        out: the folder; None looks through runs/.
        command: its name and settings. Each file and folder that they name is compared too.
    """
    for receipt in [out / _RECEIPT] if out else sorted(RUNS.glob(f"*/{_RECEIPT}")):
        folder = receipt.parent
        if read_json(receipt) == {"inputs": _inputs(command, folder), "files": short_hash(_files(folder))}:
            return folder
    return None


def mark_finished(out: Path, *command: Any) -> None:
    """Let `finished` know this command; arguments as there."""
    write_json(out / _RECEIPT, {"inputs": _inputs(command, out), "files": short_hash(_files(out))})


def _inputs(command: Sequence[Any], folder: Path) -> str:
    """Return a checksum over a command, the files that it names, and the weights on servers that `folder` was made by.

    It is another one each time if the command names code.
    """
    cache = {"retrieval": {"cache"}}
    tree = [part.model_dump(mode="json", exclude=cache) if isinstance(part, Section) else part for part in command]
    texts: list[str] = []
    map_texts(tree, texts.append)
    # A list of data sets, or the address of a model.
    named = {part.strip() for text in texts for part in (text, text.partition(":")[2], *text.split(","))} - {""}
    for record in (file for level in ("", "*/", "*/*/") for file in folder.glob(f"{level}identity.json")):
        with contextlib.suppress(AttributeError, LookupError, TypeError):  # a record of another make
            named |= {model["root"] for model in (read_json(record) or {})["served"].values() if "root" in model}
    inputs: list[Any] = [time.time_ns() for text in texts if text.startswith("python:")]
    for name in sorted(named):
        with contextlib.suppress(ConfigError, OSError):  # no path, or one that may not be read
            path = named_path(name)
            base = (read_json(path / "adapter_config.json") or {}).get("base_model_name_or_path", path)
            inputs += [name, _files(path), _files(Path(base))]
    return short_hash([__version__, tree, inputs])


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Return path, size and time of a file, or of the files in a folder; without hidden ones, and no result of ours.

    The time is ctime, which no program can set back.
    """
    left_out = _NO_RESULT if any((path / name).is_file() for name in ("run.json", *_SUMMARIES)) else _HIDDEN
    files = [Path(place, name) for place, _, names in os.walk(path) for name in names]
    files = [file for file in files or [path] if not left_out.search(file.relative_to(path).as_posix())]
    # SQLite writes when it opens a file.
    stated = [(file, file.stat()) for file in files if file.is_file()]
    return sorted((str(file), at.st_size, (file.name != _JOURNAL) * at.st_ctime_ns) for file, at in stated)


def write_config(folder: Path, settings: Section) -> None:
    """Write `config.yaml`: the resolved settings, with their checksum, as a part of YAML can be valid YAML."""
    text = dump(settings)
    write_text(folder / CONFIG, f"{_CHECKSUM}{short_hash(text)}\n{text}")


def read_config(folder: Path, command: str) -> dict[str, Any]:
    """Return the settings in `config.yaml`; raise RunError if they were changed, with the `command` that mends them."""
    file = folder / CONFIG
    try:
        tree = read_yaml(file)
    except ConfigError as error:
        raise RunError(f"{error}; {command} writes it again") from error
    first, _, text = file.read_text("utf-8").partition("\n")
    if not tree or (first.startswith(_CHECKSUM) and first != _CHECKSUM + short_hash(text)):
        problem = "was cut or changed since it was written" if tree else "is empty, as after a power cut"
        raise RunError(f"{file} {problem}; {command} writes it again")
    return tree


class RunFolder(Folder):
    """The folder of one run, or of one of its shards.

    Attributes:
        begun: whether the run, in this shard or another one, has begun before.
        journal: its calls and trees, while the folder is open.
    """

    journal: Journal

    def __init__(
        self, path: Path, config: Config, content: Mapping[str, str], varying: Container[str] = (), shard: Shard = WHOLE
    ) -> None:
        """Describe the folder of a run; nothing is written.

        Args:
            path: the folder of the run.
            config: the resolved configuration. Settings that cannot
                change a result may differ from the last time.
            content: names and checksums of the inputs (questions, corpus, prompts, models).
            varying: settings that may differ within the folder,
                such as the ones that an evaluation sweeps.
            shard: the part of the run, in its own folder below `path`.
        """
        super().__init__(shard.folder(path), "run", _JOURNAL, ignore=("shards",), record="identity.json")
        self.config, self.content, self.varying, self.shard = config, content, varying, shard
        settings = {name: value for name, value in identity(config).items() if name not in varying}
        self.identity = describe(settings, content)
        # Without the commits of Hub models, which are not known before the first call.
        named = {name: value for name, value in self.identity.items() if not name.endswith(COMMIT)}
        self.config_hash = short_hash(named)
        self.begun = False
        self._run = path

    @contextlib.contextmanager
    def open(self, *, waiting: Callable[[], object] | None = None, configures: bool = True) -> Iterator[RunFolder]:
        """Create the folder and lock it, or reopen it to resume the same run; `waiting` is as for `locked`.

        `configures`: write `config.yaml`.

        Raises:
            RunError: another process uses the folder, or it holds other files or another run.
        """
        # The run is checked before a folder of the shard
        # exists: a wrong number of shards should leave none.
        if self.shard != WHOLE:
            with self.whole() as run:
                run.check_shards(self.shard.of)
                self.begun = run.begun
        with self.locked(waiting=waiting):
            self.check_same(self.identity, Config())
            file = self.path / _JOURNAL
            if "identity" in self.facts():
                if not file.exists() or file.stat().st_size < _LEAST_BYTES:
                    problem = f"{file} is missing or empty, but {self.path} holds a run"
                    raise RunError(f"{problem}; bring the journal back from a copy, or choose a new folder for --out")
                self.begun = True
                # With a commit of the Hub that was not known when the run began.
                self.note(identity=self.identity)
            with contextlib.closing(Journal(file)) as self.journal:
                if configures:
                    write_config(self.path, self.config)
                yield self

    @staticmethod
    def begun_with(path: Path) -> dict[str, Any]:
        """Return the settings of the run that has begun in a folder; an empty tree if none has, or it is damaged."""
        with contextlib.suppress(ConfigError):  # `open` writes it again
            return read_yaml(path / CONFIG) if "identity" in RunFolder(path, Config(), {}).facts() else {}
        return {}

    @staticmethod
    def unnamed(name: str, config: Config, content: Mapping[str, str]) -> Path:
        """Return the folder of a run without `--out`; the other arguments are those of `open`."""
        described = RunFolder(Path(), config, content).identity
        return first_usable(name, lambda path: RunFolder(path, config, content), described, Config())

    def whole(self) -> contextlib.AbstractContextManager[RunFolder]:
        """Open the folder of the run that this shard is a part of, when no other shard has it open."""
        return RunFolder(self._run, self.config, self.content, varying=self.varying).open(waiting=lambda: None)

    def bind(self) -> None:
        """Mark the folder as used by this run. A failed start leaves it unmarked.

        Raises:
            RunError: the folder of a shard's run holds another run,
                or one that is cut into another number of shards.
        """
        if self.shard.of > 1:
            with self.whole() as run:
                run.bind_shards(self.shard.of)
                # Until the shard has finished again, the run is not complete.
                run.note_shard(self.shard, {})
        self.bind_shards(1)

    def bind_shards(self, shards: int) -> None:
        """Mark the folder as used by this run, in this number of shards; raise as `check_shards`."""
        self.check_shards(shards)
        self.note(identity=self.identity, shards=shards)

    def check_shards(self, shards: int) -> None:
        """Raise RunError if the folder is used by a run in another number of shards."""
        if (before := self.facts().get("shards", shards)) != shards:
            held, wanted = ("in one piece" if count == 1 else f"in {count} shards" for count in (before, shards))
            problem = f"{self.path} holds a run that is built {held}, not {wanted}"
            raise RunError(f"{problem}; go on with that, or choose a new folder for --out")

    def note_shard(self, shard: Shard, note: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Keep a note about a shard of this run; return the notes about all of them, {} if a shard has none."""
        self.note(**{f"shard {shard.number}": note})
        facts = self.facts()
        return [facts.get(f"shard {number}", {}) for number in range(facts.get("shards", 0))]


# The summary that a command writes at the end, and what to do with its folder.
_SUMMARIES = {
    "metrics.json": "an evaluation; reasonrag report shows it, and report.md in it",
    "training.json": "a training run; reasonrag report shows it",
    "improve.json": "rounds of improve; read improve.md in it, or take the runs and policies in its folders",
}


def what_holds(path: Path) -> str:
    """Describe a folder that is not what a command takes, as the end of a message."""
    if not path.is_dir():
        return "there is no such folder"
    found = next((what for name, what in _SUMMARIES.items() if (path / name).is_file()), "")
    return f"it is {found}" if found else "its command has not finished, or it is damaged; the same command finishes it"


def read_run(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Config, dict[str, Any]]:
    """Return the configuration and the summary (`run.json`) of a finished run.

    Args:
        path: the folder of the run.
        overrides: dotted names of settings that differ from the run's.

    Raises:
        RunError: the folder holds no finished run, or a link out of it, or its configuration is not as it was written.
    """
    refuse_links(path)
    if (summary := read_json(path / "run.json")) is None:
        raise RunError(f"{path} is no finished run of build-tree, with a readable run.json: {what_holds(path)}")
    saved = read_config(path, "the same build-tree command")
    folder = RunFolder(path, load_config(overrides=saved), summary.get("content") or {})
    if changes := folder.changes(folder.identity, Config()):
        raise RunError(f"{path}: config.yaml or run.json is that of another run ({changes}); copy the folder again")
    return load_config(overrides={**saved, **(overrides or {})}), summary


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that can change a result."""
    installed = {}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
