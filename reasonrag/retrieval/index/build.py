"""Build an index folder from a corpus: passages, then BM25 and vectors. Every stage resumes, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.corpus import open_corpus
from reasonrag.retrieval.encoders import TextEncoder
from reasonrag.retrieval.index.folder import BuildProgress, IndexFolder, Manifest, Part
from reasonrag.retrieval.index.passages import PASSAGES, PassageStore, build_passages, passages_memory, passages_plan
from reasonrag.retrieval.index.settings import IndexConfig, show_size
from reasonrag.retrieval.index.vector_settings import choose, memory_of, self_queries
from reasonrag.storage.shards import WHOLE, Shard

TUNING_QUERIES = 200
_BYTES_A_WORD = 6
_MOST_MERGED = 1 << 30  # bytes of scores in memory at a time: more is no faster


def build_index(
    path: Path, config: IndexConfig, *, replace: bool, progress: BuildProgress, shard: Shard = WHOLE
) -> Mapping[Part, Manifest]:
    """Build the parts that are asked for and missing, and return the manifests of all parts of the index.

    A killed build resumes, and a second call may add parts. `replace` deletes the passages of a different corpus first,
    with everything that was built over them.

    Of several processes with a `shard` each, the first one builds the passages, each encodes its part of them, and the
    last one builds the rest. BM25 is built by one.

    Raises:
        ConfigError, DataError: one line; finished stages are kept.
    """
    if not config.kind:
        raise ConfigError("no kind of index is given; add --kind bm25, --kind dense, or both")
    if shard != WHOLE and ("dense" not in config.kind or config.vectors.adopt is not None):
        raise ConfigError(
            "--shard is a part of the passages to encode: add --kind dense without --adopt, or leave it out"
        )
    if "bm25" in config.kind:
        from reasonrag.retrieval.index.postings import Tokenizer

        Tokenizer(config.bm25)  # raises for an unknown language before the passages are read
    index = IndexFolder(path)
    _refuse_other_files(index)
    _refuse_index_in_corpus(index, config.corpus)

    def waiting() -> None:
        progress.note(f"another process builds in {path}; waiting for it to finish")

    with index.locked(waiting=waiting):
        progress.note(f"memory: at most {show_size(config.max_bytes)} (--max-memory)")
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


def _kinds(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    for kind in dict.fromkeys(config.kind):
        build_kind = _bm25 if kind == "bm25" else _dense
        build_kind(index, config, progress)


def _refuse_other_files(index: IndexFolder) -> None:
    """Raise if the folder holds files that are not an index."""
    try:
        names = [path.name for path in index.path.iterdir()] if index.path.exists() else []
    except OSError as error:
        raise DataError(f"{index.path} cannot hold an index ({error.strerror}); choose another folder") from error
    strange = [name for name in names if name != ".lock"]  # a build that has just begun has nothing else
    if strange and not index.begun():
        raise DataError(f"{index.path} holds other files ({sorted(strange)[0]}, ...) and no index; choose a new folder")


def _refuse_index_in_corpus(index: IndexFolder, corpus: str | None) -> None:
    """Raise if the index is inside the folder of its corpus: the next build would read the index as corpus."""
    folder = named_path(corpus or "")
    if corpus and folder.is_dir() and index.path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{index.path} is in its own corpus {corpus}; choose a folder outside of it")


def _passages(index: IndexFolder, config: IndexConfig, replace: bool, progress: BuildProgress) -> None:
    """Verify the passages of the index if no corpus is given, else build them."""
    existing = index.manifest("passages")
    if config.corpus is None:
        if existing is None:
            raise ConfigError(f"{index.path} has no passages yet; add --corpus")
        index.verify("passages")
        return
    source = open_corpus(config.corpus)
    total = "" if source.total is None else f", {show_size(sum(passages_memory(source.total).values()))} in all"
    progress.note(f"passages: at most {show_size(sum(passages_memory(0).values()))} and 24 bytes a passage{total}")
    if existing is not None and not replace and not index.holds(passages_plan(source, config.passages)):
        raise DataError(
            f"{index.path} holds the passages of {existing.plan.made_of.get('corpus')!r}, with other rules or other "
            f"content than {source.name!r}; choose a new folder, or add --replace to build this one again"
        )
    passages = build_passages(index, source, config.passages, progress=progress)
    # Compared with what they were made of, because a killed build may have replaced only the passages.
    for part in index.parts() if replace else []:
        if index.stale(part, passages):
            index.remove(part)


def _bm25(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    from reasonrag.retrieval.index.postings import CHUNK, bm25_memory, build_bm25

    passages = index.need("passages")
    count, words = passages.counts["passages"], passages.files[PASSAGES][0] // _BYTES_A_WORD
    for chunk in (CHUNK, CHUNK // 4, CHUNK // 16, CHUNK // 64):  # smaller chunks are slower and give the same bytes
        least = bm25_memory(count, words, max_bytes=0, chunk=chunk)
        spare = config.max_bytes - sum(least.values())
        if spare >= 0:
            break
    else:
        raise ConfigError(
            f"bm25 over {count:,} passages may take {_shown(least)}, more than the limit of "
            f"{show_size(config.max_bytes)}; allow more (--max-memory)"
        )
    merging = min(least["merge"] + spare, _MOST_MERGED)
    progress.note(f"bm25: at most {_shown(bm25_memory(count, words, max_bytes=merging, chunk=chunk))}")
    build_bm25(index, config.bm25, max_bytes=merging, progress=progress, chunk=chunk)


def _shown(memory: Mapping[str, int]) -> str:
    parts = ", ".join(f"{cause} {show_size(size)}" for cause, size in memory.items())
    return f"{show_size(sum(memory.values()))} ({parts})"


def _encode(index: IndexFolder, config: IndexConfig, shard: Shard, progress: BuildProgress) -> bool:
    """Encode a part of the passages; return whether all parts are encoded now."""
    from reasonrag.retrieval.encoders import open_text_encoder
    from reasonrag.retrieval.index.embeddings import encode_part

    with closing(open_text_encoder(config.encoder)) as encoder:
        return encode_part(index, encoder, shard, progress=progress)


def _dense(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    from reasonrag.retrieval.encoders import open_text_encoder
    from reasonrag.retrieval.index.adopt import adopt_vectors

    with closing(open_text_encoder(config.encoder)) as encoder:
        if config.vectors.adopt is None:
            _vectors(index, config, encoder, progress)
        else:
            adopt_vectors(index, named_path(config.vectors.adopt), encoder, progress=progress)


def _vectors(index: IndexFolder, config: IndexConfig, encoder: TextEncoder, progress: BuildProgress) -> None:
    from reasonrag.retrieval.index.embeddings import SHARD_ROWS, build_embeddings
    from reasonrag.retrieval.index.vectors import build_vectors

    progress.note(f"embeddings: {show_size(SHARD_ROWS * encoder.dims * 4)} a shard; the model and torch come on top")
    embeddings = build_embeddings(index, encoder, progress=progress)
    rows, dims = embeddings.counts["passages"], embeddings.counts["dims"]
    settings = choose(rows, dims, config.max_bytes, kind=config.vectors.kind, recall=config.vectors.recall)
    with closing(PassageStore(index.part("passages"))) as store:
        queries = encoder.encode_queries([piece for _, piece in self_queries(store, TUNING_QUERIES)])
    progress.note(f"vectors: {settings.kind}, at most {show_size(memory_of(settings, rows, dims))}")
    build_vectors(index, settings, max_bytes=config.max_bytes, queries=queries, progress=progress)
