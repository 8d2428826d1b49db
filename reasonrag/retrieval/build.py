"""Build an index folder from a corpus: passages, then BM25 and vectors. Every stage resumes, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.index import BuildProgress, IndexConfig, IndexFolder, Manifest, Part, show_size
from reasonrag.retrieval.passages import PassageStore, build_passages, open_corpus, passages_plan, self_queries

_TUNING_QUERIES = 200


def build_index(path: Path, config: IndexConfig, *, progress: BuildProgress) -> Mapping[Part, Manifest]:
    """Build the parts of `config` that are missing, and return the manifests of all parts of the index.

    A killed build resumes, and a second call may add parts.

    Raises:
        ConfigError, DataError, RunError: one line; finished stages are kept.
    """
    if "bm25" in config.kind:
        from reasonrag.retrieval.bm25 import Tokenizer

        Tokenizer(config.bm25)  # raises for an unknown language before the passages are read
    index = IndexFolder(path)
    with index.locked(waiting=lambda: progress.note(f"another process builds in {path}; waiting for it to finish")):
        _passages(index, config, progress)
        if "bm25" in config.kind:
            from reasonrag.retrieval.bm25 import build_bm25

            build_bm25(index, config.bm25, max_bytes=config.max_bytes // 4, progress=progress)
        if "dense" in config.kind:
            _vectors(index, config, progress)
    return {part: index.need(part) for part in index.parts()}


def _passages(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    """Verify the passages of the index if no corpus is given, else build them."""
    existing = index.manifest("passages")
    if config.corpus is None:
        if existing is None:
            raise ConfigError(f"{index.path} has no passages yet; add --corpus")
        asked = config.passages.model_dump(exclude_unset=True)
        if other := {name: value for name, value in asked.items() if existing.plan.settings.get(name) != value}:
            raise ConfigError(
                f"{index.path} holds passages of other rules ({other} now); choose a new folder for --out"
            )
        index.verify("passages")
        return
    source = open_corpus(config.corpus)
    if existing is not None and not existing.plan.same(passages_plan(source, config.passages)):
        raise DataError(
            f"{index.path} holds the passages of {existing.plan.made_of.get('corpus')!r}, with other rules or other "
            f"content than {source.name!r}; choose a new folder, or delete this one"
        )
    build_passages(index, source, config.passages, progress=progress)


def _vectors(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    from reasonrag.retrieval.dense import build_embeddings, build_vectors, choose
    from reasonrag.retrieval.encoders import TextEncoder

    encoder = TextEncoder(config.encoder)
    counts = build_embeddings(index, encoder, progress=progress).counts
    settings = choose(counts["passages"], counts["dims"], config.max_bytes, kind=config.vectors.kind)
    with closing(PassageStore(index)) as store:
        # There are no queries of users yet, so pieces of its own passages stand for them.
        queries = encoder.encode_queries(self_queries(store, _TUNING_QUERIES))
    progress.note(f"vectors: {settings.kind} {settings.factory}, chosen for {show_size(config.max_bytes)} of memory")
    build_vectors(index, settings, queries=queries, progress=progress)
