"""Encode texts as vectors: by their words, or with a sentence-transformers model as its own files describe it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError
from reasonrag.core.event_loop import Worker
from reasonrag.core.plugins import trusted
from reasonrag.core.settings import named_path
from reasonrag.core.text import normalize_answer
from reasonrag.retrieval.index import EncoderConfig
from reasonrag.storage.files import size_and_digest

Vectors = NDArray[np.float32]

_NAMING = ("name", "family", "revision")  # of an identity; they do not change the vectors ("family": of version 0.1.0)

# Prefixes of queries and passages that the model cards ask for and the
# models' files do not have. A wrong prefix raises no error: the search
# only finds less. The first pattern that a model's name matches counts.
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_BGE = "Represent this sentence for searching relevant passages: "
PREFIXES: Mapping[str, tuple[str, str]] = {
    r"e5-.*instruct": (_WEB_SEARCH, ""),  # huggingface.co/intfloat/multilingual-e5-large-instruct
    r"\be5-": ("query: ", "passage: "),  # huggingface.co/intfloat/e5-base-v2
    r"\bbge-(small|base|large)-en": (_BGE, ""),  # huggingface.co/BAAI/bge-base-en-v1.5
}
_LONGEST = 512  # tokens of a text, for a model that does not limit them

# Files that decide the vectors; the last pattern has the modules of sentence-transformers.
_DECIDING = ["*.safetensors", "*.json", "*.txt", "*.model", "*.py", "[0-9]*_*/*"]
# Among them, files that a model on the Hub and a copy of it may have differently.
_IGNORED = (
    *("requirements*.txt", "*data_config.json", "*generation_config.json"),
    *("train*", "eval*", "README*", "LICENSE*"),
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folder of a model, its name (Hub id or folder name) and its commit on the Hub ("" for a folder)."""

    folder: Path
    name: str
    revision: str

    def checksum(self) -> str:
        """Return the SHA-256 over names and bytes of weights, configs, tokenizer and modules."""
        digest = hashlib.sha256()
        for path in sorted({path for pattern in _DECIDING for path in self.folder.glob(pattern)}):
            if path.is_file() and not any(path.match(ignored) for ignored in _IGNORED):
                digest.update(f"{path.relative_to(self.folder)} {size_and_digest(path)[1]}\n".encode())
        return digest.hexdigest()


def find_files(name_or_path: str, *, revision: str | None = None) -> ModelFiles:
    """Find a model by folder or Hub id; download missing files. Weights are read from safetensors alone.

    Raises:
        ConfigError: the folder does not exist, and the Hub lacks the model or cannot be reached.
    """
    folder = named_path(name_or_path)
    if folder.is_dir():
        return ModelFiles(folder, folder.resolve().name, "")
    huggingface_hub = import_module("huggingface_hub")
    try:
        folder = Path(huggingface_hub.snapshot_download(name_or_path, revision=revision, allow_patterns=_DECIDING))
    except (huggingface_hub.errors.HfHubHTTPError, ValueError, OSError) as error:
        problem = f"encoder {name_or_path!r} cannot be loaded: it is not a folder, and the Hub does not give it"
        raise ConfigError(problem, quoting=error) from error
    return ModelFiles(folder, name_or_path, folder.name)


class TextEncoder:
    """A sentence-transformers model: a query is close to the passages that answer it. Called from one thread at a time.

    All vectors are scaled to length 1. A model trained for
    inner products of vectors of any length (Contriever,
    DPR, `*-dot-*`) therefore finds less than it could.

    Attributes:
        name: Hub id or name of the folder.
        location: Hub id or path that opens the encoder again on this machine.
        dims: dimensions of a vector.
        identity: everything that decides the vectors, except rounding: checksum, pooling, ...
    """

    def __init__(self, config: EncoderConfig, *, revision: str | None = None) -> None:
        """Load the model `config.name`, as float32 and to the best device unless the config has others.

        Raises:
            ConfigError: sentence-transformers or the model is
                missing, or the model's files do not define pooling.
        """
        if find_spec("sentence_transformers") is None:
            raise ConfigError(
                f"encoder {config.name!r} needs sentence-transformers, which is not installed; pip install "
                "'reasonrag[dense]'"
            )
        files = find_files(str(config.name), revision=revision)
        if not (files.folder / "modules.json").exists():
            raise ConfigError(
                f"encoder {files.name!r} has no modules.json, so it is unknown how token vectors become one vector; "
                "save it with sentence-transformers (SentenceTransformer(modules=[...]).save(...))"
            )
        try:
            # Its progress bars would mix with those of the build.
            import_module("transformers.utils.logging").disable_progress_bar()
            model = import_module("sentence_transformers").SentenceTransformer(
                str(files.folder),
                device=config.device,
                model_kwargs={"dtype": config.dtype or "float32", "use_safetensors": True},
                trust_remote_code=trusted(files.name, config.trust_remote_code),
                local_files_only=True,
            )
        except Exception as error:  # of torch, transformers or safetensors, about damaged, missing or unfit files
            raise ConfigError(f"encoder {files.name!r} cannot be loaded", quoting=error) from error
        longest = model.max_seq_length or _LONGEST
        model.max_seq_length = min(config.max_tokens or longest, longest)
        model.prompts = _prompts(files.name, model.prompts or {}, config)
        # "[SEP]" in a passage is text, unless the model's own prefixes hold such tokens.
        prefixes, tokenizer = "".join(model.prompts.values()), model.tokenizer
        tokenizer.split_special_tokens = not any(token in prefixes for token in tokenizer.all_special_tokens)
        self._model = model
        self._thread = Worker("the encoder")
        self._options = {"batch_size": config.batch_size, "normalize_embeddings": True, "show_progress_bar": False}
        self.name = files.name
        self.location = files.name if files.revision else str(files.folder.resolve())
        self.dims = int(model.get_embedding_dimension())
        pooling = [module.pooling_mode for module in model if hasattr(module, "pooling_mode")]
        self.identity: Mapping[str, str] = {
            "name": files.name,
            "revision": files.revision,
            "checksum": files.checksum(),
            "pooling": str(*pooling) or "none",
            "query_prefix": model.prompts["query"],
            "passage_prefix": model.prompts["document"],
            "max_tokens": str(model.max_seq_length),
            "dtype": config.dtype or "float32",
        }

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        return self._of_length_1(self._model.encode_query(list(texts), **self._options))

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        return self._of_length_1(self._model.encode_document(list(texts), **self._options))

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][dims]` vectors of queries, for code on an event loop: in one thread, one call after another."""
        vectors: list[list[float]] = (await self._thread.call(self.encode_queries, list(texts))).tolist()
        return vectors

    def _of_length_1(self, encoded: Vectors) -> Vectors:
        vectors = np.asarray(encoded, dtype=np.float32).reshape(-1, self.dims)
        # In half precision the model's own normalization is exact to three digits only.
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Vectors = np.divide(vectors, length, out=vectors, where=length > 0)
        return unit


def identity_checksum(identity: Mapping[str, str]) -> str:
    """Return the SHA-256 over everything that decides an encoder's vectors, so not its name and commit."""
    deciding = {key: value for key, value in identity.items() if key not in _NAMING}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def differences(built: Mapping[str, str], opened: Mapping[str, str]) -> str:
    """Describe how two encoders differ; "" if their vectors are the same.

    >>> differences({"name": "a", "pooling": "cls"}, {"name": "b", "pooling": "mean"})
    "pooling 'cls', not 'mean'"
    """
    changed = [key for key in built if key not in _NAMING and built[key] != opened.get(key, "")]
    return ", ".join(f"{key} {built[key][:12]!r}, not {opened.get(key, '')[:12]!r}" for key in changed)


class LexicalEncoder:
    """Counts normalized words. It needs no model and gives the same vectors on every machine.

    Vectors have one dimension per word of the texts that
    are encoded together, so only those can be compared.
    """

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][words]` counts. A text of only articles and punctuation counts as one word.

        >>> import asyncio
        >>> asyncio.run(LexicalEncoder().encode(["The Jaws director", "Jaws, Jaws", "?"]))
        [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        """
        counts = [Counter(normalize_answer(text).split() or [text.strip().lower()]) for text in texts]
        words = dict.fromkeys(word for count in counts for word in count)
        return [[float(count[word]) for word in words] for count in counts]


def open_encoder(spec: str) -> LexicalEncoder | TextEncoder:
    """Open the `lexical` encoder, or a model by Hub id or folder; raise ConfigError if it cannot be opened."""
    return LexicalEncoder() if spec == "lexical" else TextEncoder(EncoderConfig(name=spec, batch_size=32))


def _prompts(name: str, own: Mapping[str, str], config: EncoderConfig) -> dict[str, str]:
    """Return the prefixes of queries and documents: from the settings, else the model's files, else its name."""
    known = (prefixes for pattern, prefixes in PREFIXES.items() if re.search(pattern, name.lower()))
    query, document = next(known, ("", ""))
    # Every saved model has empty ones, so only others count.
    query = own.get("query") or query
    document = own.get("document") or own.get("passage") or document
    return {
        "query": query if config.query_prefix is None else config.query_prefix,
        "document": document if config.passage_prefix is None else config.passage_prefix,
    }
