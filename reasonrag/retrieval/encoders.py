"""Texts to vectors: by their words, or by a sentence-transformers model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import normalize_answer, one_line
from reasonrag.retrieval.encoder_models import POOLINGS, EncoderFiles, Family, find_family, find_files, loading_errors
from reasonrag.retrieval.index.settings import EncoderConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

_DTYPES = ("float32", "bfloat16", "float16")


class TextEncoder(Protocol):
    """Makes vectors of texts, so that a query lies close to the passages that answer it. One thread at a time."""

    @property
    def name(self) -> str:
        """Hub id, or name of a folder."""
        ...

    @property
    def location(self) -> str:
        """What opens it again on this machine: Hub id, or path of a folder."""
        ...

    @property
    def dims(self) -> int:
        """Numbers in a vector."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """All that decides the vectors but rounding: checksum, pooling, prefixes, ...; no path, the same everywhere."""
        ...

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """`[n, dims]` float32, rows of length 1."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """`[n, dims]` float32, rows of length 1."""
        ...

    def count_cut(self, passages: Sequence[str]) -> int:
        """How many of these passages are longer than what the model reads, so that their end does not count."""
        ...


def open_text_encoder(config: EncoderConfig) -> SentenceTransformerEncoder:
    """Open a sentence-transformers model, or plain transformers weights with their family's pooling.

    All vectors are scaled to length 1, as the families here are trained for. A model trained for inner products of
    vectors of any length (Contriever, DPR, `*-dot-*`) therefore finds less than it could. Encoding on several devices
    uses sentence-transformers' process pool; no test covers it.

    Args:
        config: the model (`name` is required) and how it reads. `dtype` None is float32, `device` None the best device.

    Raises:
        ConfigError: sentence-transformers is missing, the model cannot be found, or nothing says how it pools.
    """
    if find_spec("sentence_transformers") is None:
        raise ConfigError(
            f"encoder {config.name!r} needs sentence-transformers, which is not installed; "
            "pip install 'reasonrag[dense]', or take the encoder lexical"
        )
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
        self._devices = _devices(config)
        self._pool: Any = None
        own = _own_prompts(model)
        self._prefixes = {
            "query": _first(config.query_prefix, own.get("query"), known.query_prefix if known else ""),
            "passage": _first(config.passage_prefix, own.get("passage"), known.passage_prefix if known else ""),
        }
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
            "dtype": _dtype(config),
        }

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """`[n, dims]` float32, rows of length 1. Always on the first device."""
        return self._encode(texts, self._prefixes["query"])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """`[n, dims]` float32, rows of length 1. Several devices take a share each, in a process of their own."""
        if len(self._devices) > 1 and self._pool is None:
            self._pool = self._model.start_multi_process_pool(list(self._devices))
        return self._encode(texts, self._prefixes["passage"], pool=self._pool)

    def count_cut(self, passages: Sequence[str]) -> int:
        """How many of these passages are longer than what the model reads."""
        prefix = self._prefixes["passage"]
        # A token holds one character at least: most passages need no tokenizer to be known as short enough.
        long = [prefix + text for text in passages if len(prefix) + len(text) > self._max_tokens - 8]
        if not long:
            return 0
        ids = self._model.tokenizer(long, truncation=False, padding=False, verbose=False)["input_ids"]
        return sum(len(found) > self._max_tokens for found in ids)

    def close(self) -> None:
        """End the processes of several devices; a single one has none."""
        if self._pool is not None:
            self._model.stop_multi_process_pool(self._pool)
            self._pool = None

    def _encode(self, texts: Sequence[str], prefix: str, *, pool: Any = None) -> Vectors:
        import numpy as np

        if not texts:
            return np.empty((0, self.dims), np.float32)
        found = self._model.encode(
            list(texts),
            prompt=prefix,
            batch_size=self._batch_size,
            pool=pool,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        vectors = np.asarray(found, dtype=np.float32)
        # Rows of half precision are of length 1 to three digits only.
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Vectors = np.divide(vectors, length, out=vectors, where=length > 0)
        return unit


def identity_checksum(identity: Mapping[str, str]) -> str:
    """SHA-256 over all of an encoder that decides its vectors: not over its name, its family and its commit."""
    deciding = {key: value for key, value in identity.items() if key not in ("name", "family", "revision")}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def differences(built: Mapping[str, str], found: Mapping[str, str]) -> str:
    """What makes two encoders different, for people; "" where nothing does.

    >>> differences({"name": "a", "pooling": "cls"}, {"name": "b", "pooling": "mean"})
    "pooling 'cls', not 'mean'"
    """
    keys = [key for key in built if key not in ("name", "family", "revision") and built[key] != found.get(key)]
    shown = {key: (built[key], found.get(key, "")) for key in keys}
    if "checksum" in shown:
        shown["checksum"] = (built["checksum"][:12], found.get("checksum", "")[:12])
    return ", ".join(f"{key} {one!r}, not {other!r}" for key, (one, other) in shown.items())


class LexicalEncoder:
    """Counts of normalised words: no model, the same on every machine.

    Vectors have one dimension for each word of the texts that are encoded together, so only those can be compared.
    """

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """`[n][words]` counts. A text of nothing but articles and punctuation is one word: itself.

        >>> asyncio.run(LexicalEncoder().encode(["The Jaws director", "Jaws, Jaws", "?"]))
        [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        """
        counts = [Counter(normalize_answer(text).split() or [text.strip().lower()]) for text in texts]
        places = {word: place for place, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
        vectors = [[0.0] * len(places) for _ in counts]
        for vector, count in zip(vectors, counts, strict=True):
            for word, times in count.items():  # few of thousands: the zeros are one number, not one each
                vector[places[word]] = float(times)
        return vectors


class SentenceEncoder:
    """The queries' side of a `TextEncoder` for code on an event loop. One thread encodes, one call after another."""

    def __init__(self, encoder: TextEncoder) -> None:
        """Take an open encoder."""
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """`[n][dims]`, each of length 1."""
        loop = asyncio.get_running_loop()
        vectors = await loop.run_in_executor(self._thread, self._encoder.encode_queries, list(texts))
        found: list[list[float]] = vectors.tolist()
        return found


def open_encoder(spec: str) -> LexicalEncoder | SentenceEncoder:
    """`lexical`, or the encoder of that name or folder: the one that the passages are found with.

    Raises:
        ConfigError: it cannot be opened.
    """
    return (
        LexicalEncoder()
        if spec == "lexical"
        else SentenceEncoder(open_text_encoder(EncoderConfig(name=spec, batch_size=32)))
    )


def _devices(config: EncoderConfig) -> list[str] | list[None]:
    return config.device.split(",") if config.device else [None]


def _dtype(config: EncoderConfig) -> str:
    return config.dtype or "float32"


def _load(files: EncoderFiles, config: EncoderConfig, family: Family | None) -> Any:
    """Return the model with its own modules, or plain weights with the modules of their family."""
    library = import_module("sentence_transformers")
    device = _devices(config)[0]
    options = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    weights = {"dtype": _dtype(config)}
    try:
        with _no_bars():
            if files.has_modules():
                model = library.SentenceTransformer(str(files.folder), device=device, model_kwargs=weights, **options)
                _check_pooling(files, model, config.pooling)
                return model
            pooling = _family_pooling(files, config.pooling, family)
            modules = import_module("sentence_transformers.sentence_transformer.modules")
            body = modules.Transformer(
                str(files.folder), model_kwargs=options | weights, config_kwargs=options, processor_kwargs=options
            )
            pool = modules.Pooling(body.get_embedding_dimension(), pooling)
            return library.SentenceTransformer(modules=[body, pool, modules.Normalize()], device=device)
    except loading_errors() as error:
        raise ConfigError(f"encoder {files.name!r} cannot be loaded ({one_line(str(error))[:200]})") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' progress bars, which would stand among our own."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _check_pooling(files: EncoderFiles, model: Any, wanted: str | None) -> None:
    found = _pooling(model)
    if wanted is not None and wanted != found:
        raise ConfigError(
            f"encoder {files.name!r} says itself that it pools by {found}, not by {wanted}; leave the pooling out, or "
            "take its modules.json away"
        )


def _family_pooling(files: EncoderFiles, wanted: str | None, family: Family | None) -> str:
    pooling = wanted or (family.pooling if family else None)
    if pooling not in POOLINGS:
        found = f"has no pooling {pooling!r}" if pooling else "has no modules.json and is of no known family"
        raise ConfigError(
            f"encoder {files.name!r} {found}, so nothing says how one vector is made of its tokens'; name its family, "
            f"or a pooling: {', '.join(POOLINGS)}"
        )
    return pooling


def _pooling(model: Any) -> str:
    """As the model's modules do it; "none" where a module gives one vector in another way."""
    for module in model:
        mode = getattr(module, "pooling_mode", None)
        if mode is not None:
            return mode if isinstance(mode, str) else "+".join(mode)
    return "none"


def _own_prompts(model: Any) -> dict[str, str]:
    """The prefixes that a model's own files give. An empty one says nothing: every saved model has those."""
    prompts = model.prompts or {}
    passage = prompts.get("document") or prompts.get("passage")
    return {name: text for name, text in (("query", prompts.get("query")), ("passage", passage)) if text}


def _first(*found: str | None) -> str:
    return next((text for text in found if text is not None), "")


def _limit(model: Any, files: EncoderFiles, wanted: int | None, family: Family | None) -> int:
    """Tokens that the model reads of a text; sets it in the model."""
    places = files.document("config.json").get("max_position_embeddings")
    known = [limit for limit in (model.max_seq_length, places) if isinstance(limit, int) and 0 < limit < 1 << 30]
    if not files.has_modules() and family:
        known.append(family.max_tokens)
    longest = min(known, default=family.max_tokens if family else 512)
    if wanted is not None and not 8 <= wanted <= longest:
        raise ConfigError(f"encoder {files.name!r} reads 8 to {longest} tokens of a text, not {wanted}")
    model.max_seq_length = wanted or longest
    return int(model.max_seq_length)
