"""Encoder models: how each family reads a text, where a model's files are, and a checksum over them.

A wrong prefix or pooling raises no error: it only finds less. Each family names the model card it was taken from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from reasonrag.core.documents import named_path, parse_json
from reasonrag.core.errors import ConfigError
from reasonrag.storage.files import size_and_digest

Pooling = Literal["mean", "cls", "lasttoken"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
_CONFIGS = ("*.json", "*.txt", "*.model", "*.py", "[0-9]*_*/*")  # the last one: modules of sentence-transformers
_SAFETENSORS, _PYTORCH = "*.safetensors", "pytorch_model*.bin"
# Files that do not change the vectors: a model on the Hub and a copy of it may have different ones.
_BESIDE = (
    *("README*", "LICENSE*", "requirements*.txt"),
    *("*data_config.json", "*generation_config.json", "train*", "eval*"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one family were trained to read; all of them compare by cosine."""

    names: str  # pattern that the lower-case names of its models match
    pooling: Pooling  # how the vectors of all tokens become one vector
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 512  # the longest text that the models were trained on; the rest is cut off


# The first match counts, so special cases come before general ones.
FAMILIES: Mapping[str, Family] = {
    # huggingface.co/intfloat/e5-mistral-7b-instruct: last token, instruction for queries only
    "e5-mistral": Family(r"e5-mistral", "lasttoken", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery: ", max_tokens=4096),
    # huggingface.co/intfloat/multilingual-e5-large-instruct: instruction for queries, nothing for passages
    "e5-instruct": Family(r"e5-.*instruct", "mean", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery: "),
    # huggingface.co/intfloat/e5-base-v2, multilingual-e5-base: "Each input text should start with query: or passage: "
    "e5": Family(r"\be5-", "mean", query_prefix="query: ", passage_prefix="passage: "),
    # huggingface.co/BAAI/bge-m3: CLS, "you no longer need to add instruction to the queries"
    "bge-m3": Family(r"\bbge-m3", "cls", max_tokens=8192),
    # huggingface.co/BAAI/bge-base-en-v1.5: CLS, an instruction for short queries that look for long passages
    "bge-en": Family(
        r"\bbge-(small|base|large)-en", "cls", query_prefix="Represent this sentence for searching relevant passages: "
    ),
    # huggingface.co/Alibaba-NLP/gte-base-en-v1.5, gte-multilingual-base: CLS, nothing in front
    "gte-v1.5": Family(r"\bgte-(\w+-en-v1\.5|multilingual-base)", "cls", max_tokens=8192),
    # huggingface.co/thenlper/gte-base: mean, nothing in front
    "gte": Family(r"\bgte-(small|base|large)", "mean"),
    # huggingface.co/Qwen/Qwen3-Embedding-0.6B: last token, instruction for queries only, no blank behind "Query:"
    "qwen3-embedding": Family(
        r"qwen3-embedding", "lasttoken", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery:", max_tokens=32768
    ),
    # huggingface.co/sentence-transformers/all-MiniLM-L6-v2: mean, nothing in front, cut at 256 word pieces
    "minilm": Family(r"\ball-minilm-l\d+", "mean", max_tokens=256),
    # huggingface.co/sentence-transformers/all-mpnet-base-v2: mean, nothing in front, cut at 384 word pieces
    "mpnet": Family(r"\ball-mpnet-base", "mean", max_tokens=384),
}


def find_family(family: str, *names: str) -> tuple[str, Family | None]:
    """Return a family by its name, or for `auto` the first that one of the model's names matches, else ("own", None).

    A model of the family `own` reads as its own files say. Names are Hub id, name of the folder, name in the config.

    Raises:
        ConfigError: the family is unknown.

    >>> find_family("auto", "intfloat/e5-base-v2")[0], find_family("auto", "model", "BAAI/bge-m3")[0]
    ('e5', 'bge-m3')
    >>> find_family("auto", "my-encoder")
    ('own', None)
    """
    if family in FAMILIES:
        return family, FAMILIES[family]
    if family not in ("auto", "own"):
        raise ConfigError(f"there is no encoder family {family!r}; choose auto, own, {', '.join(FAMILIES)}")
    if family == "auto":
        for name in names:
            for key, entry in FAMILIES.items():
                if re.search(entry.names, name.lower()):
                    return key, entry
    return "own", None


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """The folder of a model, its name (Hub id or folder name) and its commit on the Hub ("" for a folder)."""

    folder: Path
    name: str
    revision: str

    def document(self, name: str) -> dict[str, Any]:
        """Parse a JSON file of the model; empty if it does not exist."""
        try:
            document = parse_json((self.folder / name).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {self.name!r}: {name} cannot be read", quoting=error) from error
        return document if isinstance(document, dict) else {}

    def has_modules(self) -> bool:
        """Whether sentence-transformers saved the model, so that its files say how it pools."""
        return (self.folder / "modules.json").exists()

    def checksum(self) -> str:
        """Return the SHA-256 over names and bytes of weights, configs, tokenizer and modules."""
        digest = hashlib.sha256()
        for path in _deciding(self.folder):
            digest.update(f"{path.relative_to(self.folder)} {size_and_digest(path)[1]}\n".encode())
        return digest.hexdigest()


def find_files(name_or_path: str, *, revision: str | None = None) -> EncoderFiles:
    """Find a model by folder or Hub id; download what the local cache lacks.

    Raises:
        ConfigError: there is no such folder, and the Hub has no such model or cannot be reached.
    """
    folder = named_path(name_or_path)
    if folder.is_dir():
        if revision:
            raise ConfigError(f"encoder {name_or_path!r} is a folder, which has no revision {revision!r}; leave it out")
        return EncoderFiles(folder, folder.resolve().name, "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=[*_CONFIGS, _SAFETENSORS]))
        if not any(snapshot.glob(_SAFETENSORS)):
            snapshot_download(name_or_path, revision=snapshot.name, allow_patterns=[_PYTORCH])
    except HFValidationError as error:
        raise ConfigError(f"encoder {name_or_path!r} cannot be loaded: no such folder, and no Hub id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        what = f"encoder {name_or_path!r} cannot be loaded: it is no folder, and the Hub does not give it"
        raise ConfigError(what, quoting=error) from error
    return EncoderFiles(snapshot, name_or_path, snapshot.name)


def _deciding(folder: Path) -> list[Path]:
    weights = _SAFETENSORS if any(folder.glob(_SAFETENSORS)) else _PYTORCH
    deciding = set()
    for pattern in (*_CONFIGS, weights):
        for path in folder.glob(pattern):
            if path.is_file() and not any(path.match(beside) for beside in _BESIDE):
                deciding.add(path)
    return sorted(deciding)


def require_dense(needed_by: str, *, otherwise: str) -> None:
    """Raise if sentence-transformers is not installed; the message ends with `otherwise`, what works without it."""
    if find_spec("sentence_transformers") is None:
        raise ConfigError(
            f"{needed_by} needs sentence-transformers, which is not installed; pip install 'reasonrag[dense]', or "
            f"{otherwise}"
        )


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Raise ConfigError for what torch, transformers and safetensors raise if files are damaged, missing or unfit."""
    from safetensors import SafetensorError

    raised = (SafetensorError, OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError)
    try:
        yield
    except raised as error:
        raise ConfigError(f"{model} cannot be loaded", quoting=error) from error
