"""Encode texts as vectors: by their words, or with a sentence-transformers model as its own files describe it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.errors import ConfigError
from reasonrag.core.event_loop import Worker
from reasonrag.core.plugins import trusted
from reasonrag.core.settings import named_path
from reasonrag.core.text import normalize_answer
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.storage.files import read_json, size_and_digest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

_NAMING = ("name", "family", "revision")  # of an identity; they do not change the vectors ("family": of version 0.1.0)

# Prefixes of queries and passages that the model cards ask for and the models' files do not have. A wrong prefix raises
# no error: the search only finds less. The first pattern that a model's name matches counts.
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_BGE = "Represent this sentence for searching relevant passages: "
PREFIXES: Mapping[str, tuple[str, str]] = {
    r"e5-.*instruct": (_WEB_SEARCH, ""),  # huggingface.co/intfloat/multilingual-e5-large-instruct
    r"\be5-": ("query: ", "passage: "),  # huggingface.co/intfloat/e5-base-v2
    r"\bbge-(small|base|large)-en": (_BGE, ""),  # huggingface.co/BAAI/bge-base-en-v1.5
}

_CONFIGS = ("*.json", "*.txt", "*.model", "*.py", "[0-9]*_*/*")  # the last one: modules of sentence-transformers
_SAFETENSORS, _PYTORCH = "*.safetensors", "pytorch_model*.bin"
# Files that do not change the vectors: a model on the Hub and a copy of it may have different ones.
_IGNORED = (
    *("README*", "LICENSE*", "requirements*.txt"),
    *("*data_config.json", "*generation_config.json", "train*", "eval*"),
)


class TextEncoder(Protocol):
    """Encodes texts so that a query is close to the passages that answer it. Called from one thread at a time."""

    name: str  # Hub id or name of a folder
    location: str  # Hub id or path that opens the encoder again on this machine
    dims: int  # of a vector
    identity: Mapping[str, str]  # everything that decides the vectors, except rounding: checksum, pooling, ...

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        ...

    def count_cut(self, passages: Sequence[str]) -> int:
        """Count the passages that are longer than the limit of the model, so that their end is ignored."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folder of a model, its name (Hub id or folder name) and its commit on the Hub ("" for a folder)."""

    folder: Path
    name: str
    revision: str

    def config(self) -> dict[str, Any]:
        """Return the model's config.json; empty if it is missing or damaged."""
        return read_json(self.folder / "config.json") or {}

    def has_modules(self) -> bool:
        """Whether sentence-transformers saved the model, so that its files define how it pools."""
        return (self.folder / "modules.json").exists()

    def checksum(self) -> str:
        """Return the SHA-256 over names and bytes of weights, configs, tokenizer and modules."""
        weights = _SAFETENSORS if any(self.folder.glob(_SAFETENSORS)) else _PYTORCH
        deciding = set()
        for pattern in (*_CONFIGS, weights):
            for path in self.folder.glob(pattern):
                if path.is_file() and not any(path.match(ignored) for ignored in _IGNORED):
                    deciding.add(path)
        digest = hashlib.sha256()
        for path in sorted(deciding):
            digest.update(f"{path.relative_to(self.folder)} {size_and_digest(path)[1]}\n".encode())
        return digest.hexdigest()


def find_files(name_or_path: str, *, revision: str | None = None) -> ModelFiles:
    """Find a model by folder or Hub id; download missing files.

    Raises:
        ConfigError: the folder does not exist, and the Hub lacks the model or cannot be reached.
    """
    folder = named_path(name_or_path)
    if folder.is_dir():
        return ModelFiles(folder, folder.resolve().name, "")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=[*_CONFIGS, _SAFETENSORS]))
        if not any(snapshot.glob(_SAFETENSORS)):
            snapshot_download(name_or_path, revision=snapshot.name, allow_patterns=[_PYTORCH])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        problem = f"encoder {name_or_path!r} cannot be loaded: it is not a folder, and the Hub does not give it"
        raise ConfigError(problem, quoting=error) from error
    return ModelFiles(snapshot, name_or_path, snapshot.name)


def open_text_encoder(config: EncoderConfig, *, revision: str | None = None) -> SentenceTransformerEncoder:
    """Open a sentence-transformers model.

    All vectors are scaled to length 1. A model trained for inner products of vectors of any length (Contriever, DPR,
    `*-dot-*`) therefore finds less than it could.

    The config needs a `name`. Its `dtype` None is float32, its `device` None the best device.

    Raises:
        ConfigError: sentence-transformers is missing, the model cannot be found, or its files do not define pooling.
    """
    require_dense(f"encoder {config.name!r}", otherwise="take the encoder lexical")
    files = find_files(str(config.name), revision=revision)
    if not files.has_modules():
        raise ConfigError(
            f"encoder {files.name!r} has no modules.json, so it is unknown how token vectors become one vector; save "
            "it with sentence-transformers (SentenceTransformer(modules=[Transformer(...), Pooling(...)]).save(...))"
        )
    with loading(f"encoder {files.name!r}"):
        # Its progress bars would mix with those of the build.
        import_module("transformers.utils.logging").disable_progress_bar()
        model = import_module("sentence_transformers").SentenceTransformer(
            str(files.folder),
            device=config.device,
            model_kwargs={"dtype": config.dtype or "float32"},
            trust_remote_code=trusted(files.name, config.trust_remote_code),
            local_files_only=True,
        )
    return SentenceTransformerEncoder(model, files, config)


class SentenceTransformerEncoder:
    """A `TextEncoder` on sentence-transformers; `open_text_encoder` opens one."""

    def __init__(self, model: Any, files: ModelFiles, config: EncoderConfig) -> None:
        """Decide on prefixes and length, and checksum the model's files."""
        self._model = model
        self._batch_size = config.batch_size
        self._prefixes = _prefixes(model, files, config)
        # "[SEP]" in a passage is text, unless the model's own prefixes hold such tokens.
        own = [token for token in model.tokenizer.all_special_tokens if token in "".join(self._prefixes.values())]
        model.tokenizer.split_special_tokens = not own
        self._max_tokens = _limit(model, files, config.max_tokens)
        self.name = files.name
        self.location = files.name if files.revision else str(files.folder.resolve())
        self.dims = int(model.get_embedding_dimension())
        self.identity: Mapping[str, str] = {
            "name": files.name,
            "revision": files.revision,
            "checksum": files.checksum(),
            "pooling": _pooling(model),
            "query_prefix": self._prefixes["query"],
            "passage_prefix": self._prefixes["passage"],
            "max_tokens": str(self._max_tokens),
            "dtype": config.dtype or "float32",
        }

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._prefixes["query"])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts, self._prefixes["passage"])

    def count_cut(self, passages: Sequence[str]) -> int:
        prefix = self._prefixes["passage"]
        # A token has at least one character, so most passages are short enough without asking the tokenizer.
        long = [prefix + text for text in passages if len(prefix) + len(text) > self._max_tokens - 8]
        if not long:
            return 0
        ids = self._model.tokenizer(long, truncation=False, padding=False, verbose=False)["input_ids"]
        return sum(len(tokens) > self._max_tokens for tokens in ids)

    def _encode(self, texts: Sequence[str], prefix: str) -> Vectors:
        import numpy as np

        if not texts:
            return np.empty((0, self.dims), np.float32)
        encoded = self._model.encode(
            list(texts),
            prompt=prefix,
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        vectors = np.asarray(encoded, dtype=np.float32)
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
    described = []
    for key, expected in built.items():
        actual = opened.get(key, "")
        if key in _NAMING or expected == actual:
            continue
        if key == "checksum":
            expected, actual = expected[:12], actual[:12]
        described.append(f"{key} {expected!r}, not {actual!r}")
    return ", ".join(described)


class LexicalEncoder:
    """Counts normalized words. It needs no model and gives the same vectors on every machine.

    Vectors have one dimension per word of the texts that are encoded together, so only those can be compared.
    """

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][words]` counts. A text of only articles and punctuation counts as one word.

        >>> import asyncio
        >>> asyncio.run(LexicalEncoder().encode(["The Jaws director", "Jaws, Jaws", "?"]))
        [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        """
        counts = [Counter(normalize_answer(text).split() or [text.strip().lower()]) for text in texts]
        columns: dict[str, int] = {}
        for count in counts:
            for word in count:
                columns.setdefault(word, len(columns))
        vectors = []
        for count in counts:
            # Only the words of the text are set: of thousands of words it has few.
            vector = [0.0] * len(columns)
            for word, times in count.items():
                vector[columns[word]] = float(times)
            vectors.append(vector)
        return vectors


class SentenceEncoder:
    """Encodes queries with a `TextEncoder` for code on an event loop, in one thread, one call after another."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.identity = dict(encoder.identity)
        self._thread = Worker("the encoder")

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return `[n][dims]` vectors of length 1."""
        vectors = await self._thread.call(self._encoder.encode_queries, list(texts))
        as_lists: list[list[float]] = vectors.tolist()
        return as_lists


def open_encoder(spec: str) -> LexicalEncoder | SentenceEncoder:
    """Open the `lexical` encoder, or a model by Hub id or folder; raise ConfigError if it cannot be opened."""
    if spec == "lexical":
        return LexicalEncoder()
    return SentenceEncoder(open_text_encoder(EncoderConfig(name=spec, batch_size=32)))


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


def _pooling(model: Any) -> str:
    """Return how the model's modules pool; "none" if they make one vector in another way."""
    for module in model:
        mode = getattr(module, "pooling_mode", None)
        if mode is not None:
            return mode if isinstance(mode, str) else "+".join(mode)
    return "none"


def _prefixes(model: Any, files: ModelFiles, config: EncoderConfig) -> dict[str, str]:
    """Return the prefixes of queries and passages: from the settings, else the model's files, else its name."""
    prefixes = {"query": "", "passage": ""}
    names = (files.name, str(files.config().get("_name_or_path", "")))
    for pattern, (query, passage) in PREFIXES.items():
        if any(re.search(pattern, name.lower()) for name in names):
            prefixes = {"query": query, "passage": passage}
            break
    prompts = model.prompts or {}
    own = {"query": prompts.get("query"), "passage": prompts.get("document") or prompts.get("passage")}
    prefixes |= {kind: prefix for kind, prefix in own.items() if prefix}  # every saved model has empty ones
    given = {"query": config.query_prefix, "passage": config.passage_prefix}
    return prefixes | {kind: prefix for kind, prefix in given.items() if prefix is not None}


def _limit(model: Any, files: ModelFiles, max_tokens: int | None) -> int:
    """Set and return how many tokens of a text the model reads."""
    positions = files.config().get("max_position_embeddings")
    limits = [limit for limit in (model.max_seq_length, positions) if isinstance(limit, int) and 0 < limit < 1 << 30]
    longest = min(limits, default=512)
    if max_tokens is not None and not 8 <= max_tokens <= longest:
        raise ConfigError(f"encoder {files.name!r} reads 8 to {longest} tokens of a text, not {max_tokens}")
    model.max_seq_length = max_tokens or longest
    return int(model.max_seq_length)
