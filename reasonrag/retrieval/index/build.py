"""A corpus to an index folder: passages, then what is searched in them. Every stage is resumable and bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.corpus import CorpusSource, open_corpus
from reasonrag.retrieval.encoders import TextEncoder
from reasonrag.retrieval.index.folder import IndexFolder, Manifest, Part
from reasonrag.retrieval.index.passages import (
    PASSAGES,
    PassageStore,
    build_passages,
    passages_memory,
    passages_plan,
)
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.retrieval.index.sample import self_queries
from reasonrag.retrieval.index.settings import IndexConfig, PassagesConfig, show_size
from reasonrag.retrieval.index.vector_settings import choose, memory_of

TUNING_QUERIES = 200
_BYTES_A_WORD = 6
_MOST_MERGED = 1 << 30  # bytes of scores in memory at a time: more is no faster


def build_index(path: Path, config: IndexConfig, *, replace: bool, progress: BuildProgress) -> Mapping[Part, Manifest]:
    """Build what is asked for and not there; a killed build goes on where it was.

    Args:
        path: the index folder; parts may be added to one that has others.
        config: what to build.
        replace: take away passages of another corpus, with all that was built over them.
        progress: told every stage.

    Returns:
        The manifests of all parts that are there now.

    Raises:
        ConfigError, DataError: one line; what was finished before stays.
    """
    if not config.kind:
        raise ConfigError("nothing is asked for; add --kind bm25, --kind dense, or both")
    if "bm25" in config.kind:
        from reasonrag.retrieval.index.postings import Tokenizer

        Tokenizer(config.bm25)  # an unknown language is told now, not behind the passages
    index = IndexFolder(path)
    _claim(index)
    _apart(index, config.corpus)
    with index.locked(waiting=lambda: progress.note(f"another process builds in {path}; waiting for it to end")):
        progress.note(f"memory: at most {show_size(config.max_bytes)} (--max-memory)")
        _passages(index, config, replace, progress)
        for kind in dict.fromkeys(config.kind):
            KINDS[kind](index, config, progress)
    return {part: manifest for part in index.parts() if (manifest := index.manifest(part))}


def _claim(index: IndexFolder) -> None:
    """Refuse a folder of somebody else's files."""
    try:
        names = [path.name for path in index.path.iterdir()] if index.path.exists() else []
    except OSError as error:
        raise DataError(f"{index.path} cannot hold an index ({error.strerror}); choose another folder") from error
    strange = [name for name in names if name != ".lock"]  # a build that is beginning has no more
    if strange and not index.begun():
        raise DataError(f"{index.path} holds other files ({sorted(strange)[0]}, ...) and no index; choose a new folder")


def _apart(index: IndexFolder, corpus: str | None) -> None:
    """Refuse an index within the folder of its corpus: the next look at the corpus would find the index in it."""
    folder = Path(corpus or "").expanduser()
    if corpus and folder.is_dir() and index.path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{index.path} lies in its own corpus {corpus}; choose a folder outside of it")


def _passages(index: IndexFolder, config: IndexConfig, replace: bool, progress: BuildProgress) -> None:
    """The passages that the others are built over: those that are there, or those of the corpus."""
    there = index.manifest("passages")
    if config.corpus is None:
        if there is None:
            raise ConfigError(f"{index.path} has no passages yet; add --corpus")
        index.verify("passages")
        return
    source = open_corpus(config.corpus)
    known = "" if source.total is None else f", {show_size(sum(passages_memory(source.total).values()))} in all"
    progress.note(f"passages: at most {show_size(sum(passages_memory(0).values()))} and 24 bytes a passage{known}")
    if there is not None and not replace:
        _same_corpus(index, there, source, config.passages)
    made = build_passages(index, source, config.passages, progress=progress)
    # By what they were made of, not by what lay there before: a killed build may have replaced the passages alone.
    for part in index.parts() if replace else []:
        if index.stale(part, made):
            index.remove(part)


def _same_corpus(index: IndexFolder, there: Manifest, source: CorpusSource, rules: PassagesConfig) -> None:
    if index.holds(passages_plan(source, rules)):
        return
    raise DataError(
        f"{index.path} holds the passages of {there.plan.made_of.get('corpus')!r}, read by other rules or of another "
        f"content than {source.name!r}; choose a new folder, or add --replace to build everything in this one anew"
    )


def _bm25(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    from reasonrag.retrieval.index.postings import CHUNK, bm25_memory, build_bm25

    passages = index.need("passages")
    count, words = passages.counts["passages"], passages.files[PASSAGES][0] // _BYTES_A_WORD
    for chunk in (CHUNK, CHUNK // 4, CHUNK // 16, CHUNK // 64):  # fewer at a time is slower and gives the same bytes
        least = bm25_memory(count, words, max_bytes=0, chunk=chunk)
        spare = config.max_bytes - sum(least.values())
        if spare >= 0:
            break
    else:
        raise ConfigError(
            f"bm25 over {count:,} passages may take {_shown(least)}; that is more than "
            f"{show_size(config.max_bytes)}: allow more (--max-memory)"
        )
    merging = min(least["merge"] + spare, _MOST_MERGED)
    progress.note(f"bm25: at most {_shown(bm25_memory(count, words, max_bytes=merging, chunk=chunk))}")
    build_bm25(index, config.bm25, max_bytes=merging, progress=progress, chunk=chunk)


def _shown(memory: Mapping[str, int]) -> str:
    """Bytes by cause, for people."""
    parts = ", ".join(f"{cause} {show_size(size)}" for cause, size in memory.items())
    return f"{show_size(sum(memory.values()))} ({parts})"


def _dense(index: IndexFolder, config: IndexConfig, progress: BuildProgress) -> None:
    from reasonrag.retrieval.encoders import open_text_encoder
    from reasonrag.retrieval.index.adopt import adopt_vectors

    with closing(open_text_encoder(config.encoder)) as encoder:
        if config.vectors.adopt is None:
            _vectors(index, config, encoder, progress)
        else:
            adopt_vectors(index, Path(config.vectors.adopt), encoder, progress=progress)


def _vectors(index: IndexFolder, config: IndexConfig, encoder: TextEncoder, progress: BuildProgress) -> None:
    from reasonrag.retrieval.index.embeddings import SHARD_ROWS, build_embeddings
    from reasonrag.retrieval.index.vectors import build_vectors

    progress.note(f"embeddings: {show_size(SHARD_ROWS * encoder.dims * 4)} a shard; the model and torch come on top")
    made = build_embeddings(index, encoder, progress=progress)
    rows, dims = made.counts["passages"], made.counts["dims"]
    settings = choose(rows, dims, config.max_bytes, kind=config.vectors.kind, recall=config.vectors.recall)
    store = PassageStore(index.part("passages"))
    queries = encoder.encode_queries([piece for _, piece in self_queries(store, TUNING_QUERIES)])
    store.close()
    progress.note(f"vectors: {settings.kind}, at most {show_size(memory_of(settings, rows, dims))}")
    build_vectors(index, settings, max_bytes=config.max_bytes, queries=queries, progress=progress)


KINDS: dict[str, Callable[[IndexFolder, IndexConfig, BuildProgress], None]] = {"bm25": _bm25, "dense": _dense}
