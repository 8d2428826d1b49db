"""A training run's folder: who may write it, which run it holds, whether that is finished, and its checkpoints.

OUT/
├── config.yaml            the resolved settings
├── checkpoints/           from which a killed run resumes
├── model.safetensors ...  the trained model, or its adapter
├── merged/                the adapter merged into its model, if asked for
├── best/                  of online training: the policy that was best on held-out questions
├── reasonrag.yaml         how the policy was prompted in training
├── curves.svg, curves.png
└── training.json          settings, data, metrics, versions: written once the run is finished

A checkpoint counts once its marker file is written, and older ones are removed only after that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.core.settings import Section, identity
from reasonrag.core.text import map_texts
from reasonrag.llm.model_folder import model_files
from reasonrag.storage.files import read_json, require_json, short_hash, write_json
from reasonrag.storage.folder import Folder, checksums, damage, describe, read_config, write_config
from reasonrag.training.settings import TrainSettings

SUMMARY = "training.json"
CHECKPOINTS = "checkpoints"
MERGED = "merged"
BEST = "best"
_IDENTITY = f"{CHECKPOINTS}/identity.json"
_MARKER = "complete.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://\S*", re.IGNORECASE)
_HOST = re.compile(r"(?<![\w.])(?:localhost|\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?(?![\w.])")
# Messages of safetensors and torch about a full disk: neither raises an OSError.
_DISK_FULL = (
    *(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *("file write failed", "unexpected pos", "iostream error"),
)


class TrainingFolder(Folder):
    """The folder of a training run."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, "training run", ignore=(CHECKPOINTS,), record=_IDENTITY)

    def is_usable(self) -> bool:
        return super().is_usable() or finished(self.path) is not None

    def facts(self) -> dict[str, Any]:
        """Return the record, as `Folder.facts`; of a finished training run without checkpoints, from its summary."""
        return super().facts() or {"identity": (finished(self.path) or {}).get("identity")}

    def changes(self, identity: Mapping[str, Any], defaults: Section) -> str:
        """Return how the training run in the folder differs; "" if it is the same one, or not worth keeping."""
        if last_checkpoint(self.path) is None and not (self.path / SUMMARY).exists():
            return ""
        return super().changes(identity, defaults)

    def bind(self, settings: TrainSettings, identity: Mapping[str, Any]) -> None:
        """Write down which training run the folder belongs to from now on."""
        self.note(identity=dict(sorted(identity.items())))
        write_config(self.path, settings)


def identity_of(stage: str, settings: TrainSettings, *, content: str, model: str) -> dict[str, Any]:
    """Return everything that can change the result of a training run.

    Args:
        stage: dpo, sft or rl.
        settings: settings that cannot change the result are left out.
        content: checksum of the data.
        model: checksum of the model to start from.
    """
    flat = {"stage": stage, **without_places(identity(settings))}
    return describe(flat, {"data": content, "model": model})


def finished(out: Path) -> dict[str, Any] | None:
    """Return `training.json` of a finished training run, or None."""
    summary = read_json(out / SUMMARY)
    return summary if summary and isinstance(summary.get("identity"), dict) else None


def written_files(out: Path) -> dict[str, list[int | str]]:
    """Return size and SHA-256 of each file of the trained model, merged and not, by its path in the folder."""
    return checksums(out, [*model_files(out), *model_files(out / MERGED)], sync=True)


def check_trained(out: Path, *, merged: bool = True) -> int:
    """Return how many files of a trained model `training.json` names, if it names any; all are as written.

    Without `merged`, the files of an adapter that was merged into its model may differ.

    Raises:
        RunError: a file differs, or `training.json` cannot be read.
    """
    files = require_json(out / SUMMARY, "copy it again").get("files") or {}
    checked = {name: entry for name, entry in files.items() if merged or not name.startswith(MERGED)}
    if problem := damage(out, checked):
        raise RunError(
            f"{out} was finished, and since then {problem}; bring that back, or delete {SUMMARY}: the same "
            "command then writes the model again from its last checkpoint. If you changed it yourself, remove "
            f"`files` from {SUMMARY}"
        )
    return len(files)


def check_settings(out: Path) -> None:
    """Raise RunError if `config.yaml` was changed since it was written."""
    read_config(out, "the same command")


def check_summary(out: Path) -> None:
    """Raise RunError if `training.json` has a number or a loss that is not finite, or is of another training run."""
    summary, place = require_json(out / SUMMARY, "copy it again"), out / SUMMARY
    described = summary.get("identity")
    held = TrainingFolder(out).facts()["identity"]
    if described != held or short_hash(described) != summary.get("name", short_hash(described)):
        raise RunError(f"{place} is of another training run, or was changed since it was written; copy it again")
    try:
        json.dumps(summary, allow_nan=False)
    except ValueError:
        raise RunError(f"{place} holds NaN or an infinity") from None
    history = summary.get("history")  # where NaN and infinities are null
    for entry in filter(lambda entry: isinstance(entry, dict), history if isinstance(history, list) else ()):
        if lost := [name for name in ("loss", "eval_loss", "grad_norm") if entry.get(name, 0) is None]:
            raise RunError(f"{place}: {lost[0]} of step {entry.get('step')} was not a finite number")


@contextlib.contextmanager
def explain_full_disk(out: Path) -> Iterator[None]:
    """Turn any error about a full disk into one line.

    Raises:
        RunError: a file could not be written; complete checkpoints are kept.
    """
    try:
        yield
    except Exception as error:
        if not any(message in str(error) for message in _DISK_FULL):
            raise
        raise RunError(
            f"{out}: the disk is full, or a quota or a limit on the size of files is reached; free some space and run "
            "the same command again, it resumes from the last complete checkpoint"
        ) from error


def last_checkpoint(out: Path, log: Callable[[str], None] | None = None) -> Path | None:
    """Return the latest complete checkpoint, or None.

    A checkpoint whose writing was interrupted has no marker, and one that lost data since (a full disk, a power cut)
    has files of other sizes than in the marker: both are ignored. With a `log`, checksums are compared too, and it
    receives a line about each checkpoint that is damaged.
    """
    for checkpoint in reversed(_checkpoints(out)):
        if not (problem := checkpoint_problem(checkpoint, fully=log is not None)):
            return checkpoint
        if log is not None:
            log(f"{checkpoint.name} is left out: {problem}")
    return None


def checkpoint_problem(checkpoint: Path, *, fully: bool = True) -> str:
    """Return the problem of a checkpoint: no marker, or a file that changed; "" if it is complete.

    Files are compared by size and, if `fully`, by checksum.
    """
    files = (read_json(checkpoint / _MARKER) or {}).get("files")
    if not isinstance(files, dict):
        return f"{_MARKER} is missing or damaged: it was not written to its end"
    return damage(checkpoint, files, fully=fully)


def mark_complete(checkpoint: Path, *, seconds: float) -> None:
    """Write the marker that makes a checkpoint count, once it is on disk: the size and the checksum of each file.

    `seconds` is the duration of the run so far.
    """
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = checksums(checkpoint, (path for path in paths if path.name != _MARKER), sync=True)
    write_json(checkpoint / _MARKER, {"seconds": seconds, "files": files}, indent=1)


def seconds_before(checkpoint: Path) -> float:
    """Return the seconds that a complete checkpoint's run had taken."""
    return float((read_json(checkpoint / _MARKER) or {})["seconds"])


def remove_old(out: Path, *, keep: int, best: str | None = None) -> None:
    """Remove checkpoints, except the `keep` latest complete ones and the one in the folder `best`."""
    checkpoints = _checkpoints(out)
    complete = [checkpoint for checkpoint in checkpoints if not checkpoint_problem(checkpoint, fully=False)]
    for checkpoint in checkpoints:
        is_best = best is not None and checkpoint.name == Path(best).name
        if checkpoint not in complete or not (is_best or checkpoint in complete[-keep:]):
            (checkpoint / _MARKER).unlink(missing_ok=True)  # first: a half removed checkpoint must not count
            shutil.rmtree(checkpoint, ignore_errors=True)


def _checkpoints(out: Path) -> list[Path]:
    """Return all checkpoints, complete or not, by step."""
    folders = (out / CHECKPOINTS).glob("checkpoint-*")
    checkpoints = [path for path in folders if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))


def without_places(value: Any) -> Any:
    """Return the same tree with every text stripped of where on a machine or in a network something is.

    An absolute, home or relative path is shortened to its last name, also after a scheme; a URL to its scheme.

    >>> without_places({"judge": {"spec": "http://10.0.0.1:8000/v1"}, "url": ["https://corpus.example"]})
    {'judge': {'spec': 'http://…'}, 'url': ['https://…']}
    >>> without_places(["~/.cache/reasonrag", "hf:/models/mine/", "Qwen/Qwen2.5-7B", "demo:hiprag", 0.5])
    ['reasonrag', 'hf:mine', 'Qwen/Qwen2.5-7B', 'demo:hiprag', 0.5]
    """
    return map_texts(value, _without_place)


def _without_place(text: str) -> str:
    text = _HOST.sub("…", _URL.sub(r"\1://…", text))
    if text.startswith(("/", "~", "./", "../")):
        return Path(text).name or text
    scheme, colon, rest = text.partition(":")
    return f"{scheme}:{_without_place(rest)}" if colon and "://" not in text else text
