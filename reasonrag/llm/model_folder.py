"""A model's folder and what it takes of this machine: checksum, base model, finite weights, memory, CPU threads."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from math import prod
from pathlib import Path, PurePath
from typing import Any

import structlog

from reasonrag.core.config import POLICY_CARD
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import excerpt, parse_json
from reasonrag.storage.files import read_json

log = structlog.get_logger()

# Files that a loader reads. Reports, curves and checkpoints
# of a training run change no reply, and may come later.
_READ = (
    *("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"),
    POLICY_CARD,
)
_NOT_READ = frozenset(("training.json", "trainer_state.json"))
# PEFT matches these with the names of a model's modules. A group that is repeated may take time that
# doubles by letter, and each other repeat multiplies it by the length of a name.
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_REPEATS = 5
_OF_A_TRAINING = re.compile(r"merged|best|policy|checkpoint-\d+")
_LONGEST_NAME = 200  # that a server may give a model in a message
_PART = 2**20
_SMALL = 20_000_000  # parameters of a model whose matrices are too small to be split
_CGROUP = Path("/sys/fs/cgroup")


def public_name(path_or_name: str) -> str:
    """Return a model's name in run identities: a Hub name as it is, the last part of a folder's path.

    >>> public_name("Qwen/Qwen2.5-7B-Instruct"), public_name("/models/mine/"), public_name("./out/policy")
    ('Qwen/Qwen2.5-7B-Instruct', 'mine', 'policy')
    """
    # A path tells where something is on this machine, which does not belong into data sets.
    path = named_path(path_or_name)
    is_path = path.is_absolute() or path_or_name.startswith(".") or path.is_dir()
    return path.resolve().name if is_path else path_or_name


def model_identity(name: str, revision: str | None = None) -> str:
    """Return a Hub id with its revision, or a folder's name with the checksum of its files."""
    folder = Path(name)
    if not folder.is_dir():
        return name + (f"@{revision}" if revision else "")
    return f"{folder.resolve().name}@{model_checksum(folder)}"


def served_identity(root: str) -> str:
    """Return what a server serves from `root`: the identity of a folder on this machine, else the folder's name.

    >>> served_identity("/mnt/qwen-7b"), served_identity("/mnt/dpo/merged")
    ('qwen-7b', 'dpo/merged')
    """
    with suppress(OSError, ValueError):  # too long for a path
        if any((Path(root) / name).is_file() for name in ("config.json", "adapter_config.json")):
            return model_identity(root)
    parts = PurePath(root).parts
    # Each training has folders of these names.
    return "/".join(parts[-2:] if _OF_A_TRAINING.fullmatch(parts[-1]) else parts[-1:])[:_LONGEST_NAME]


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model, or that in the local cache of a Hub id, which is called by its commit."""
    folder = named_path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a valid Hub id
        for file in ("config.json", "adapter_config.json"):
            cached = try_to_load_from_cache(name, file, revision=revision)
            if isinstance(cached, str):
                return Path(cached).parent
    return None


def model_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a Hub model that was loaded: a branch may move, and `main` stands for no revision."""
    return None if named_path(name).is_dir() else getattr(local_folder(name, revision), "name", None)


def model_checksum(folder: Path) -> str:
    """Return 12 hex digits over a model's weights, settings, tokenizer, chat template, code and policy card.

    The checksum of an adapter includes its base model, if that is a folder.
    """
    # A set, as an adapter may lie in the folder of its base model.
    files = set(model_files(folder))
    if (base := adapter_base(folder)) and Path(base).is_dir():
        files.update(model_files(Path(base)))
        try:
            check_base(folder)
        except DataError as error:
            log.warning(str(error))
    for path in {path.parent for path in files}:
        if problem := shards_problem(path):
            raise ConfigError(f"{path}: {problem}")
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\0".encode())
        with path.open("rb") as file:
            # Files up to 64 MiB are read whole, of larger ones 64 evenly spaced parts: training changes
            # all weights, and reading 15 GB would take longer than a preview.
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(_PART))
    return digest.hexdigest()[:12]


def check_base(folder: Path) -> None:
    """Raise DataError if an adapter that was trained here was trained on other files than its model has now."""
    base, trained = adapter_base(folder), (read_json(folder / "training.json") or {}).get("model")
    known = str(trained.get("checksum")) if isinstance(trained, dict) else ""
    # One that was trained further names the adapter before it.
    if not base or not Path(base).is_dir() or not known.startswith(f"{Path(base).resolve().name}@"):
        return
    if not known.startswith(model_identity(base)):
        raise DataError(f"the adapter was trained on a model with other files than {base} has; bring those back")


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model that a loader reads: weights, settings, tokenizer, chat template, code, card."""
    files = (path for pattern in _READ for path in folder.glob(pattern))
    return sorted(path for path in files if path.name not in _NOT_READ and path.is_file())


def shards_problem(folder: Path) -> str:
    """Return which shard that an index of weights names is not beside it in safetensors, or ""."""
    for file in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = set(parse_json(file.read_bytes())["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{file.name} cannot be read"
        for name in sorted(map(str, names)):
            if PurePath(name).name != name or not (name.endswith(".safetensors") and (folder / name).is_file()):
                return f"{file.name} names {excerpt(name, 80)}, and no file of safetensors there is called that"
    return ""


def adapter_base(folder: Path) -> str | None:
    """Return the base model of the adapter in a folder, or None if it holds no adapter.

    Raises:
        ConfigError: the adapter's configuration cannot be read.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = parse_json(file.read_bytes())
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} does not name the adapter's model; write it again with save_pretrained") from error
    if not base:
        raise ConfigError(f"{file} names no base_model_name_or_path; put the model's folder or Hub id there")
    if any(folder.glob("model*.safetensors")) and named_path(str(base)).resolve() != folder.resolve():
        raise ConfigError(f"{folder} holds a whole model and an adapter on another one, {base}; move one of them away")
    for name in _PATTERNS:
        given = config.get(name) or ()
        for pattern in map(str, [given] if isinstance(given, str) else given):
            if _REPEATED_GROUP.search(pattern) or len(re.findall("[*+{]", pattern)) > _MOST_REPEATS:
                raise ConfigError(
                    f"{file}: a pattern of {name} repeats a group, or more than {_MOST_REPEATS} parts, which may never "
                    "end; name the modules"
                )
    modules = config.get("target_modules")
    if isinstance(modules, list):  # PEFT drops the tensors of other modules
        used = tuple(f".{name}" for name in modules)
        tensors = (name.partition(".lora_") for name in _header(folder / "adapter_model.safetensors"))
        if dropped := [module for module, lora, _ in tensors if lora and not module.endswith(used)]:
            raise ConfigError(
                f"{file} leaves out {len(dropped)} tensors of the adapter ({dropped[0]}): put the adapter_config.json "
                "of these weights there"
            )
    return str(base)


def _header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name; none if it cannot be read, which loading it reports."""
    try:
        # Eight bytes with the length of the header, little-endian, then JSON.
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, MemoryError, OverflowError):
        return {}


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
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            for name in names:
                if not _is_finite(tensors.get_tensor(name)):
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


def weights_of(path_or_name: str, revision: str | None = None) -> tuple[int, int]:
    """Return the number of a folder's weights, or of a cached Hub model's, and their bytes; zeros if not known.

    Only the headers of the safetensors files are read.
    """
    folder = local_folder(path_or_name, revision)
    parameters = size = 0
    for file in folder.glob("*.safetensors") if folder else ():
        try:
            for tensor in _header(file).values():
                begin, end = tensor["data_offsets"]
                parameters += prod(tensor["shape"])
                size += end - begin
        except (ValueError, KeyError, TypeError, OverflowError):
            return 0, 0  # loading the model reports the problem
    return parameters, size


def free_memory() -> int | None:
    """Return the bytes that this process can still take, of the machine and of its container; None if unknown."""
    try:
        import psutil
    except ImportError:
        return None
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # "max", or no such file: no limit
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The container gives cached files back when it needs their memory.
        free = min(free, limit - used + int(statistics["inactive_file"]))
    return max(free, 0)


def require_memory(
    path_or_name: str, dtype: str | None, *, copies: int = 1, revision: str | None = None, remedy: str
) -> None:
    """Raise if the weights alone do not fit into memory, `copies` times: the system kills such a process silently.

    Raises:
        ConfigError: the model does not fit; names the memory
            that it needs, the free memory and the `remedy`.
    """
    (parameters, size), free = weights_of(path_or_name, revision), free_memory()
    if dtype is not None:
        size = parameters * (4 if dtype == "float32" else 2)
    needed = copies * size
    if free is not None and needed > free:
        raise ConfigError(
            f"{path_or_name}: it takes at least {needed / 1e9:,.1f} GB of memory ({parameters / 1e9:,.2f} "
            f"billion parameters), and {free / 1e9:,.1f} GB are free; take {remedy}"
        )


def choose_threads(model: Any) -> int:
    """Return how many threads torch should use for a model: one for a small model on a CPU, else its own choice."""
    import torch

    # Threads of a product wait for the slowest, and spin
    # meanwhile: of small matrices that takes longer than the rest.
    parameters = sum(weights.numel() for weights in model.parameters())
    is_small = next(model.parameters()).device.type == "cpu" and parameters < _SMALL
    return 1 if is_small else int(torch.get_num_threads())
