"""A model's folder: a checksum of what a loader reads in it, and the model that an adapter belongs to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import POLICY_CARD

# What a loader reads. Reports, curves, locks and checkpoints of a training change no reply, and may come later.
_READ = (
    "*.safetensors",
    "pytorch_model*.bin",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    POLICY_CARD,
)
_NOT_READ = frozenset(("training.json", "trainer_state.json"))
_PART = 2**20


def model_identity(name: str, revision: str | None = None) -> str:
    """A Hub id with its revision, or a folder's name with a checksum of what a loader reads in it."""
    folder = Path(name)
    if not folder.is_dir():
        return name + (f"@{revision}" if revision else "")
    return f"{folder.resolve().name}@{model_checksum(folder)}"


def model_checksum(folder: Path) -> str:
    """12 hex digits that change with the model: weights, settings, tokenizer, chat template, code, policy card.

    Of an adapter also with the model that it belongs to, where that is a folder.
    """
    digest = hashlib.sha256()
    files = {
        path
        for place in (folder, *_adapted(folder))
        for pattern in _READ
        for path in place.glob(pattern)
        if path.is_file()
    }
    for path in sorted(path for path in files if path.name not in _NOT_READ):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\0".encode())
        with path.open("rb") as file:
            # Whole files up to 64 MiB. Of larger ones 64 evenly spaced parts: any training changes all of the weights,
            # and reading 15 GB would take longer than a preview.
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(_PART))
    return digest.hexdigest()[:12]


def adapter_base(folder: Path) -> str | None:
    """The model that the adapter in a folder belongs to; None where there is no adapter.

    Raises:
        ConfigError: the adapter's configuration cannot be read.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not name the adapter's model; write it again with save_pretrained") from error
    if not base:
        raise ConfigError(f"{file} names no base_model_name_or_path; put the model's folder or Hub id there")
    return str(base)


def _adapted(folder: Path) -> tuple[Path, ...]:
    base = adapter_base(folder)
    return (Path(base),) if base and Path(base).is_dir() else ()
