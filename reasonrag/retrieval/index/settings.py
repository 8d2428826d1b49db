"""Settings of `index build`: corpus, passages, BM25, encoder, vectors, memory."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError, field_validator, model_validator

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import Section, execution, setting

Kind = Literal["bm25", "dense"]
_SIZE = TypeAdapter(ByteSize)
_LEAST = 256 << 20


class PassagesConfig(Section):
    """Which rows become passages.

    Rows that are not JSON, or have no id or no contents, are set aside, and so are passages with an earlier id.
    A passage that is too long is split between words: the first piece keeps the id, the others are `ID#2`, `ID#3`, ...
    Each piece begins with the title, which is the first of several lines and has at most 30 words.
    """

    # The order of these fields is their order in the manifest of an index.
    strict: bool = setting(
        False, "refuse a corpus with unusable rows instead of setting them aside", "--strict/--no-strict"
    )
    max_words: int = setting(1000, "maximum words of a passage; longer ones are split", "--max-words", ge=10)
    chunk_words: int | None = setting(None, "split every text into passages of this many words", "--chunk-words", ge=10)


class BM25Config(Section):
    """How BM25 cuts texts into words and weighs them. A title is the first of several lines."""

    # The order of these fields is their order in the manifest of an index.
    stemmer: str | None = setting("english", "stemmer for words: a Snowball language, or none", "--stemmer")
    stopwords: str | None = setting("english", "words to ignore: a list that bm25s knows, or none", "--stopwords")
    k1: float = setting(1.2, "BM25 k1: how slowly repeated words saturate", "--k1", ge=0)
    b: float = setting(0.75, "BM25 b: how much long passages are penalised", "--b", ge=0, le=1)
    title_weight: int = setting(1, "how often each word of the title counts", "--title-weight", ge=1, le=100)

    @field_validator("stemmer", "stopwords", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value


class EncoderConfig(Section):
    """Which model encodes passages and queries. A field that is not given comes from the model's files.

    Stored vectors are float32, whatever the dtype of the weights.
    """

    name: str | None = setting(
        None, "sentence-transformers model that encodes passages and queries: a Hub id or a folder", "--encoder"
    )
    query_prefix: str | None = setting(None, "text in front of every query (default: the model's)")
    passage_prefix: str | None = setting(None, "text in front of every passage (default: the model's)")
    max_tokens: int | None = setting(
        None, "maximum tokens of a text; the rest is cut off (default: the model's limit)", ge=8
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "dtype of the encoder's weights: float32, bfloat16 or float16", "--dtype"
    )
    batch_size: int = setting(64, "passages per batch of the encoder", "--encode-batch", ge=1)
    device: str | None = execution(None, "device of encoder and reranker, for example cpu, cuda or cuda:1", "--device")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")


class VectorsConfig(Section):
    """Which FAISS index searches the vectors, and how well."""

    kind: Literal["auto", "flat", "ivf-sq8", "ivf-pq", "hnsw"] = setting(
        "auto", "type of FAISS index; auto chooses by the number of vectors and the memory", "--vectors"
    )
    recall: float = setting(
        0.95, "target recall@10 against exact search, for which the search is tuned", "--recall", gt=0, le=1
    )
    adopt: str | None = execution(None, "existing FAISS index over these passages, in their order", "--adopt")


class IndexConfig(Section):
    """Everything that `index build` depends on."""

    corpus: str | None = execution(
        None,
        "corpus to search: a JSONL(.gz, .zst) or Parquet file with id and contents. `index build` "
        "also takes a folder of them or of texts, a known name (wiki18, ...), or hub:OWNER/NAME:FILE",
        "--corpus",
    )
    kind: tuple[Kind, ...] = execution((), "what to build: bm25, dense, or both", "--kind")
    max_memory: str | None = execution(
        None, "maximum memory of the build, for example 8G (default: half of this machine's)", "--max-memory"
    )
    passages: PassagesConfig = PassagesConfig()
    bm25: BM25Config = BM25Config()
    encoder: EncoderConfig = EncoderConfig()
    vectors: VectorsConfig = VectorsConfig()

    @field_validator("max_memory")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @model_validator(mode="after")
    def _encoder_is_named(self) -> IndexConfig:
        if "dense" in self.kind and self.encoder.name is None:
            raise ValueError(
                "a dense index needs a model: add --encoder, for example intfloat/e5-base-v2, BAAI/bge-base-en-v1.5, "
                "Qwen/Qwen3-Embedding-0.6B or sentence-transformers/all-MiniLM-L6-v2"
            )
        if "dense" not in self.kind and (self.encoder.name is not None or self.vectors.adopt is not None):
            raise ValueError("an encoder or a FAISS index is given, but no dense index is asked for; add --kind dense")
        return self

    @property
    def max_bytes(self) -> int:
        """The memory limit of the build in bytes."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return memory // 2 if self.max_memory is None else parse_size(self.max_memory)


def parse_size(text: str) -> int:
    """Parse a size such as 8G or 512M into bytes.

    Raises:
        ConfigError: the text is not a size, or it is less than a build needs.

    >>> parse_size("1.5G"), parse_size("512 MiB")
    (1500000000, 536870912)
    """
    try:
        size = int(_SIZE.validate_python(text))
    except (ValidationError, OverflowError):
        raise ConfigError(f"size {text!r} is not of the form 8G or 512M") from None
    if size < _LEAST:
        raise ConfigError(f"size {text!r} is below {show_size(_LEAST)}, less than an index can be built in")
    return size


def show_size(size: float) -> str:
    """Format bytes with a binary unit.

    >>> show_size(1610612736), show_size(900)
    ('1.5 GiB', '900 B')
    """
    return ByteSize(size).human_readable(separator=" ")
