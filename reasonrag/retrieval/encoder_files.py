"""Where the files of an encoder lie, and a checksum over those that decide its vectors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import one_line

_CONFIGS = ("*.json", "*.txt", "*.model", "*.py", "[0-9]*_*/*")  # the last one: a sentence-transformers module each
_SAFETENSORS, _PYTORCH = "*.safetensors", "pytorch_model*.bin"
# What stands beside a model and does not change its vectors; the same model has other ones on the Hub and in a copy.
_BESIDE = (
    "README*",
    "*data_config.json",
    "train*",
    "eval*",
    "requirements*.txt",
    "LICENSE*",
    "*generation_config.json",
)


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """A folder with a model, its name (Hub id, or name of the folder) and the Hub's commit ("" of a folder)."""

    folder: Path
    name: str
    revision: str

    def document(self, name: str) -> dict[str, Any]:
        """A JSON file of the model; empty where there is none."""
        try:
            document = json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {self.name!r}: {name} cannot be read ({one_line(str(error))[:200]})") from error
        return document if isinstance(document, dict) else {}

    def has_modules(self) -> bool:
        """Whether sentence-transformers saved it, so that it says itself how it pools."""
        return (self.folder / "modules.json").exists()

    def checksum(self) -> str:
        """SHA-256 over names and bytes of weights, configs, tokenizer and modules."""
        digest = hashlib.sha256()
        for path in _deciding(self.folder):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(self.folder)} {content}\n".encode())
        return digest.hexdigest()


def find_files(name_or_path: str, *, revision: str | None = None) -> EncoderFiles:
    """The folder of that path, or of that Hub id in the local cache; what is not there yet is downloaded.

    Raises:
        ConfigError: there is neither.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if revision:
            raise ConfigError(f"encoder {name_or_path!r} is a folder, which has no revision {revision!r}; leave it out")
        return EncoderFiles(folder, folder.resolve().name, "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=[*_CONFIGS, _SAFETENSORS]))
        if not any(found.glob(_SAFETENSORS)):
            snapshot_download(name_or_path, revision=found.name, allow_patterns=[_PYTORCH])
    except HFValidationError as error:
        raise ConfigError(f"encoder {name_or_path!r} cannot be loaded: no such folder, and no Hub id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = one_line(str(error))[:200]
        raise ConfigError(
            f"encoder {name_or_path!r} cannot be loaded: it is no folder, and the Hub does not give it ({reason})"
        ) from error
    return EncoderFiles(found, name_or_path, found.name)


def _deciding(folder: Path) -> list[Path]:
    weights = _SAFETENSORS if any(folder.glob(_SAFETENSORS)) else _PYTORCH
    found = {path for pattern in (*_CONFIGS, weights) for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not any(path.match(pattern) for pattern in _BESIDE))


def loading_errors() -> tuple[type[Exception], ...]:
    """What torch, transformers and safetensors raise for files that are damaged, missing or not what they should be."""
    from safetensors import SafetensorError

    return SafetensorError, OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError
