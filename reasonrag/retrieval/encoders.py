"""Encode texts as vectors: by their words, or with a sentence-transformers model."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.errors import ConfigError
from reasonrag.core.plugins import trusted
from reasonrag.core.text import normalize_answer
from reasonrag.core.watch import Worker
from reasonrag.retrieval.encoder_models import (
    POOLINGS,
    EncoderFiles,
    Family,
    find_family,
    find_files,
    loading,
    require_dense,
)
from reasonrag.retrieval.index.settings import EncoderConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

_LOOK_S = 2.0  # whether the process that encodes still has its parent
_DTYPES = ("float32", "bfloat16", "float16")
_NAMING = ("name", "family", "revision")  # of an identity; they do not change the vectors


class TextEncoder(Protocol):
    """Encodes texts so that a query is close to the passages that answer it. Called from one thread at a time."""

    name: str  # Hub id or name of a folder
    location: str  # Hub id or path that opens the encoder again on this machine
    dims: int  # of a vector
    identity: Mapping[str, str]  # what decides the vectors, except rounding: checksum, pooling, ..., but no path

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Return `[n, dims]` float32 vectors of length 1."""
        ...

    def count_cut(self, passages: Sequence[str]) -> int:
        """Count the passages that are longer than what the model reads, so that their end is ignored."""
        ...


def open_text_encoder(config: EncoderConfig) -> SentenceTransformerEncoder:
    """Open a sentence-transformers model, or plain transformers weights with their family's pooling.

    All vectors are scaled to length 1, as the families here are trained for. A model trained for inner products of
    vectors of any length (Contriever, DPR, `*-dot-*`) therefore finds less than it could. Encoding on several devices
    uses sentence-transformers' process pool; no test covers it.

    The config needs a `name`. Its `dtype` None is float32, its `device` None the best device.

    Raises:
        ConfigError: sentence-transformers is missing, the model cannot be found, or nothing says how it pools.
    """
    require_dense(f"encoder {config.name!r}", otherwise="take the encoder lexical")
    if config.dtype not in (None, *_DTYPES):
        raise ConfigError(f"encoder dtype {config.dtype!r} is none of {', '.join(_DTYPES)}")
    files = find_files(str(config.name), revision=config.revision)
    family, known = find_family(config.family, files.name, str(files.document("config.json").get("_name_or_path", "")))
    return SentenceTransformerEncoder(_load(files, config, known), files, config, family)


class SentenceTransformerEncoder:
    """A `TextEncoder` on sentence-transformers; `open_text_encoder` opens one."""

    def __init__(self, model: Any, files: EncoderFiles, config: EncoderConfig, family: str) -> None:
        """Decide on prefixes and length, and checksum the model's files."""
        _, known = find_family(family)
        self._model = model
        self._batch_size = config.batch_size
        self._devices = config.device.split(",") if config.device else []
        self._pool: Any = None
        family_prefixes = {"query": known.query_prefix, "passage": known.passage_prefix} if known else {}
        self._prefixes = {"query": "", "passage": ""} | family_prefixes | _own_prompts(model)
        for kind, prefix in (("query", config.query_prefix), ("passage", config.passage_prefix)):
            if prefix is not None:
                self._prefixes[kind] = prefix
        # "[SEP]" in a passage is text, unless the model's own prefixes hold such tokens.
        own = [token for token in model.tokenizer.all_special_tokens if token in "".join(self._prefixes.values())]
        model.tokenizer.split_special_tokens = not own
        self._max_tokens = _limit(model, files, config.max_tokens, known)
        self.name = files.name
        self.location = files.name if files.revision else str(files.folder.resolve())
        self.dims = int(model.get_embedding_dimension())
        self.identity: Mapping[str, str] = {
            "name": files.name,
            "revision": files.revision,
            "checksum": files.checksum(),
            "family": family,
            "pooling": _pooling(model),
            "query_prefix": self._prefixes["query"],
            "passage_prefix": self._prefixes["passage"],
            "max_tokens": str(self._max_tokens),
            "dtype": config.dtype or "float32",
        }

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Encode on the first device."""
        return self._encode(texts, self._prefixes["query"])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Encode on all devices; if there are several, each has a process and takes a share."""
        if self._pool is None and len(self._devices) > 1:
            self._model.ends_with_parent = _EndsWithParent()
            self._pool = self._model.start_multi_process_pool(self._devices)
        return self._encode(texts, self._prefixes["passage"], pool=self._pool)

    def count_cut(self, passages: Sequence[str]) -> int:
        prefix = self._prefixes["passage"]
        # A token has at least one character, so most passages are short enough without asking the tokenizer.
        long = [prefix + text for text in passages if len(prefix) + len(text) > self._max_tokens - 8]
        if not long:
            return 0
        ids = self._model.tokenizer(long, truncation=False, padding=False, verbose=False)["input_ids"]
        return sum(len(tokens) > self._max_tokens for tokens in ids)

    def close(self) -> None:
        if self._pool is not None:
            for process in self._pool["processes"]:
                process.kill()  # one that hangs may not end otherwise
            self._model.stop_multi_process_pool(self._pool)
        self._pool = None

    def _encode(self, texts: Sequence[str], prefix: str, *, pool: Any = None) -> Vectors:
        import numpy as np

        if not texts:
            return np.empty((0, self.dims), np.float32)
        encoded = self._model.encode(
            list(texts),
            prompt=prefix,
            batch_size=self._batch_size,
            pool=pool,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        vectors = np.asarray(encoded, dtype=np.float32)
        # In half precision the model's own normalization is exact to three digits only.
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Vectors = np.divide(vectors, length, out=vectors, where=length > 0)
        return unit


class _EndsWithParent:
    """Goes with a model into other processes, which would wait for texts for ever if this one is killed."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _end_with_parent, (os.getpid(),)


def _end_with_parent(parent: int) -> None:
    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def identity_checksum(identity: Mapping[str, str]) -> str:
    """Return the SHA-256 over everything that decides an encoder's vectors, so not its name, family and commit."""
    deciding = {key: value for key, value in identity.items() if key not in _NAMING}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def differences(built: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Describe how two encoders differ; "" if their vectors are the same.

    >>> differences({"name": "a", "pooling": "cls"}, {"name": "b", "pooling": "mean"})
    "pooling 'cls', not 'mean'"
    """
    described = []
    for key, expected in built.items():
        actual = found.get(key, "")
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
        words = dict.fromkeys(chain.from_iterable(counts))
        places = {word: place for place, word in enumerate(words)}
        vectors = []
        for count in counts:
            # Only the words of the text are set: of thousands of words it has few.
            vector = [0.0] * len(places)
            for word, times in count.items():
                vector[places[word]] = float(times)
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


def _load(files: EncoderFiles, config: EncoderConfig, family: Family | None) -> Any:
    """Return the model with its own modules, or plain weights with the modules of their family."""
    library = import_module("sentence_transformers")
    device = config.device.split(",")[0] if config.device else None
    options = {"trust_remote_code": trusted(files.name, config.trust_remote_code), "local_files_only": True}
    weights = {"dtype": config.dtype or "float32"}
    with loading(f"encoder {files.name!r}"), _no_bars():
        if files.has_modules():
            model = library.SentenceTransformer(str(files.folder), device=device, model_kwargs=weights, **options)
            pooling = _pooling(model)
            if config.pooling not in (None, pooling):
                raise ConfigError(
                    f"encoder {files.name!r} says that it pools by {pooling}, not by {config.pooling}; leave the "
                    "pooling out, or delete its modules.json"
                )
            return model
        pooling = _family_pooling(files, config.pooling, family)
        modules = import_module("sentence_transformers.sentence_transformer.modules")
        body = modules.Transformer(
            str(files.folder), model_kwargs=options | weights, config_kwargs=options, processor_kwargs=options
        )
        pool = modules.Pooling(body.get_embedding_dimension(), pooling)
        return library.SentenceTransformer(modules=[body, pool, modules.Normalize()], device=device)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would mix with our own."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _family_pooling(files: EncoderFiles, wanted: str | None, family: Family | None) -> str:
    pooling = wanted or (family.pooling if family else None)
    if pooling not in POOLINGS:
        problem = f"has no pooling {pooling!r}" if pooling else "has no modules.json and no known family"
        raise ConfigError(
            f"encoder {files.name!r} {problem}, so it is unknown how its tokens' vectors become one; give its family, "
            f"or a pooling: {', '.join(POOLINGS)}"
        )
    return pooling


def _pooling(model: Any) -> str:
    """Return how the model's modules pool; "none" if they make one vector in another way."""
    for module in model:
        mode = getattr(module, "pooling_mode", None)
        if mode is not None:
            return mode if isinstance(mode, str) else "+".join(mode)
    return "none"


def _own_prompts(model: Any) -> dict[str, str]:
    """Return the prefixes in a model's own files, without empty ones, which every saved model has."""
    prompts = model.prompts or {}
    prefixes = {"query": prompts.get("query"), "passage": prompts.get("document") or prompts.get("passage")}
    return {kind: prefix for kind, prefix in prefixes.items() if prefix}


def _limit(model: Any, files: EncoderFiles, wanted: int | None, family: Family | None) -> int:
    """Set and return how many tokens of a text the model reads."""
    positions = files.document("config.json").get("max_position_embeddings")
    limits = [limit for limit in (model.max_seq_length, positions) if isinstance(limit, int) and 0 < limit < 1 << 30]
    if not files.has_modules() and family:
        limits.append(family.max_tokens)
    longest = min(limits, default=family.max_tokens if family else 512)
    if wanted is not None and not 8 <= wanted <= longest:
        raise ConfigError(f"encoder {files.name!r} reads 8 to {longest} tokens of a text, not {wanted}")
    model.max_seq_length = wanted or longest
    return int(model.max_seq_length)
