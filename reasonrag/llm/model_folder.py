"""A model's folder: a checksum of the files that a loader reads, the base model of an adapter, finite weights."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from reasonrag.core.config import POLICY_CARD
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import parse_json

# Files that a loader reads. Reports, curves and checkpoints of a training run change no reply, and may come later.
_READ = (
    *("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"),
    POLICY_CARD,
)
_NOT_READ = frozenset(("training.json", "trainer_state.json"))
_PART = 2**20


def public_name(path_or_name: str) -> str:
    """Return a model's name in run identities: a Hub name as it is, the last part of a folder's path.

    >>> public_name("Qwen/Qwen2.5-7B-Instruct"), public_name("/models/mine/"), public_name("./out/policy")
    ('Qwen/Qwen2.5-7B-Instruct', 'mine', 'policy')
    """
    path = named_path(path_or_name)
    if path.is_absolute() or path_or_name.startswith(".") or path.is_dir():
        return path.resolve().name
    return path_or_name


def model_identity(name: str, revision: str | None = None) -> str:
    """Return a Hub id with its revision, or a folder's name with the checksum of its files."""
    folder = Path(name)
    if not folder.is_dir():
        return name + (f"@{revision}" if revision else "")
    return f"{folder.resolve().name}@{model_checksum(folder)}"


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model, or that in the local cache of a Hub id, which is called by its commit."""
    folder = named_path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no id of the Hub
        for file in ("config.json", "adapter_config.json"):
            if isinstance(cached := try_to_load_from_cache(name, file, revision=revision), str):
                return Path(cached).parent
    return None


def model_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a Hub model that was loaded: a branch may move, and `main` stands for no revision."""
    return None if named_path(name).is_dir() else getattr(local_folder(name, revision), "name", None)


def model_checksum(folder: Path) -> str:
    """Return 12 hex digits over a model's weights, settings, tokenizer, chat template, code and policy card.

    The checksum of an adapter includes its base model, if that is a folder.
    """
    files: set[Path] = set()
    base = adapter_base(folder)
    for model_folder in (folder, Path(base)) if base and Path(base).is_dir() else (folder,):
        files.update(model_files(model_folder))
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\0".encode())
        with path.open("rb") as file:
            # Files up to 64 MiB are read whole, of larger ones 64 evenly spaced parts: training changes all weights,
            # and reading 15 GB would take longer than a preview.
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(_PART))
    return digest.hexdigest()[:12]


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that a loader reads: weights, settings, tokenizer, chat template, code, card."""
    files = (path for pattern in _READ for path in folder.glob(pattern))
    return sorted(path for path in files if path.name not in _NOT_READ and path.is_file())


def adapter_base(folder: Path) -> str | None:
    """Return the base model of the adapter in a folder, or None if it holds no adapter.

    Raises:
        ConfigError: the adapter's configuration cannot be read.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = parse_json(file.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not name the adapter's model; write it again with save_pretrained") from error
    if not base:
        raise ConfigError(f"{file} names no base_model_name_or_path; put the model's folder or Hub id there")
    return str(base)


def first_not_finite(model: Any) -> str | None:
    """Return the name of the first parameter of a torch model that holds NaN or an infinity, or None.

    Of a model that is spread over processes, this looks at the part of this one.
    """
    for name, weight in model.named_parameters():
        if not _is_finite(weight.to_local() if hasattr(weight, "to_local") else weight):
            return str(name)
    return None


def check_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, of which one at a time is read.

    Raises:
        DataError: one holds NaN or an infinity, which it names; or the file is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as held:
            names = held.keys()
            for name in names:
                if not _is_finite(held.get_tensor(name)):
                    raise DataError(f"{file.name}: {name} holds NaN or infinities")
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it was removed meanwhile
        raise DataError(f"{file.name} is no safetensors file, or damaged", quoting=error) from error
    return len(names)


def _is_finite(tensor: Any) -> bool:
    """Return whether every number of a torch tensor is finite: smallest and largest are, in a tenth of the time."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    comparable = tensor.float() if tensor.element_size() == 1 else tensor  # torch compares no floats of 8 bits
    return bool(torch.isfinite(torch.stack(torch.aminmax(comparable.detach()))).all())
