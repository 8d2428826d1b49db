"""Build an index folder from a corpus: passages, then BM25 and vectors. Every stage resumes, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.types import WHOLE, Shard
from reasonrag.retrieval.corpus import open_corpus
from reasonrag.retrieval.encoders import TextEncoder
from reasonrag.retrieval.index.folder import BuildProgress, IndexFolder, Manifest, Part
from reasonrag.retrieval.index.passages import PassageStore, build_passages, passages_plan
from reasonrag.retrieval.index.settings import IndexConfig, show_size

TUNING_QUERIES = 200
_MOST_MERGED = 1 << 30  # bytes of scores in memory at a time: more does not make it faster


def build_index(
    path: Path, config: IndexConfig, *, replace: bool, progress: BuildProgress, shard: Shard = WHOLE
) -> Mapping[Part, Manifest]:
    """Build the parts of `config` that are missing, and return the manifests of all parts of the index.

    A killed build resumes, and a second call may add parts. `replace` deletes the passages of a different corpus first,
    with everything that was built over them.

    Of several processes with a `shard` each, the first one builds the passages, each encodes its part of them, and the
    last one builds the rest. BM25 is built by one.

    Raises:
        ConfigError, DataError, RunError: one line; finished stages are kept.
    """
    if not config.kind:
        raise ConfigError("no kind of index is given; add --kind bm25, --kind dense, or both")
    if shard != WHOLE and ("dense" not in config.kind or config.vectors.adopt is not None):
        raise ConfigError(
            "--shard is a part of the passages to encode: add --kind dense without --adopt, or leave it out"
        )
    if "bm25" in config.kind:
        from reasonrag.retrieval.bm25 import Tokenizer

        Tokenizer(config.bm25)  # raises for an unknown language before the passages are read
    folder = named_path(config.corpus or "")
    if config.corpus and folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{path} is in its own corpus {config.corpus}; choose a folder outside of it")
    index = IndexFolder(path)

    def waiting() -> None:
        progress.note(f"another process builds in {path}; waiting for it to finish")

    with index.locked(waiting=waiting):
        _passages(index, config, replace, progress)
        if shard == WHOLE:
            _kinds(index, config, progress)
    if shard != WHOLE:
        if _encode(index, config, shard, progress):
            with index.locked(waiting=waiting):
                _kinds(index, config, progress)
        else:
            progress.note(f"shard {shard} is encoded; the last one, or this command without --shard, builds the rest")
    return {part: index.need(part) for part in index.parts()}


def _passages(index: IndexFolder, config: IndexConfig, replace: bool, progress: BuildProgress) -> None:
    """Verify the passages of the index if no corpus is given, else build them."""
    existing = index.manifest("passages")
    if config.corpus is None:
        if existing is None:
            raise ConfigError(f"{index.path} has no passages yet; add --corpus")
        index.verify("passages")
        return
    source = open_corpus(config.corpus)
    if existing is not None and not replace and not existing.plan.same(passages_plan(source, config.passages)):
        raise DataError(
            f"{index.path} holds the passages of {existing.plan.made_of.get('corpus')!r}, with other rules or other "
            f"content than {source.name!r}; choose a new folder, or add --replace to build this one again"
        )
    passages = build_passages(index, source, config.passages, progress=progress)
    # Compared with the passages that each part was built from: a killed build may have replaced only the passages.
    for part in index.parts() if replace else []:
        if index.need(part).plan.made_of.get("passages", passages.fingerprint) != passages.fingerprint:
            index.remove(part)


def _kinds(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    if "bm25" in config.kind:
        from reasonrag.retrieval.bm25 import build_bm25

        build_bm25(index, config.bm25, max_bytes=min(config.max_bytes // 4, _MOST_MERGED), progress=progress)
    if "dense" in config.kind:
        from reasonrag.retrieval.encoders import open_text_encoder
        from reasonrag.retrieval.index.vectors import adopt_vectors

        encoder = open_text_encoder(config.encoder)
        if config.vectors.adopt is None:
            _vectors(index, config, encoder, progress)
        else:
            adopt_vectors(index, named_path(config.vectors.adopt), encoder, progress=progress)


def _encode(index: IndexFolder, config: IndexConfig, shard: Shard, progress: BuildProgress) -> bool:
    """Encode a part of the passages; return whether all parts are encoded now."""
    from reasonrag.retrieval.encoders import open_text_encoder
    from reasonrag.retrieval.index.embeddings import encode_part

    return encode_part(index, open_text_encoder(config.encoder), shard, progress=progress)


def _vectors(index: IndexFolder, config: IndexConfig, encoder: TextEncoder, progress: BuildProgress) -> None:
    from reasonrag.retrieval.index.embeddings import build_embeddings
    from reasonrag.retrieval.index.vectors import build_vectors, choose, self_queries

    embeddings = build_embeddings(index, encoder, progress=progress)
    rows, dims = embeddings.counts["passages"], embeddings.counts["dims"]
    settings = choose(rows, dims, config.max_bytes, kind=config.vectors.kind, recall=config.vectors.recall)
    with closing(PassageStore(index.part("passages"))) as store:
        queries = encoder.encode_queries([piece for _, piece in self_queries(store, TUNING_QUERIES)])
    progress.note(f"vectors: {settings.kind} {settings.factory}, chosen for {show_size(config.max_bytes)} of memory")
    build_vectors(index, settings, queries=queries, progress=progress)
