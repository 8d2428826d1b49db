"""The vectors of all passages, in shards: encoded once, whatever searches them later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from reasonrag.core.errors import ConfigError, DataError, is_out_of_memory
from reasonrag.core.types import Shard
from reasonrag.retrieval.encoders import TextEncoder, identity_checksum
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore, save_array
from reasonrag.storage.files import read_json, write_json

Vectors = NDArray[np.float32]

SHARD_ROWS = 8192  # passages; the most work that a kill can cost
_AT_ONCE = 1024  # passages that the encoder sorts by length and encodes between two progress updates
_LOCATION = ".encoder.json"


class Embeddings:
    """`[rows, dims]` float32 vectors of length 1 by row of `passages`, memory-mapped."""

    def __init__(self, index: IndexFolder) -> None:
        """Verify and memory-map the part `embeddings`.

        Raises:
            DataError: the index has none, or a file is missing or damaged.
        """
        folder, manifest = index.part("embeddings"), index.verify("embeddings")
        self.rows, self.dims = manifest.counts["passages"], manifest.counts["dims"]
        self.shard_rows = int(manifest.plan.settings["shard_rows"])
        self._shards: list[Vectors] = []
        for number in range(-(-self.rows // self.shard_rows)):
            # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
            self._shards.append(np.asarray(np.load(folder / _shard(number), mmap_mode="r")))

    def blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Yield the first row and the vectors of every shard, in order."""
        for number, shard in enumerate(self._shards):
            yield number * self.shard_rows, shard

    def take(self, rows: NDArray[np.int64]) -> Vectors:
        """Return the `[n, dims]` vectors of any rows, 0 <= row < rows."""
        vectors = np.empty((len(rows), self.dims), np.float32)
        shards, rows_in_shard = np.divmod(rows, self.shard_rows)
        for number in np.unique(shards):
            mask = shards == number
            vectors[mask] = self._shards[number][rows_in_shard[mask]]
        return vectors


def build_embeddings(
    index: IndexFolder, encoder: TextEncoder, *, progress: BuildProgress, shard_rows: int = SHARD_ROWS
) -> Manifest:
    """Encode every passage, `shard_rows` per file. A killed build resumes after the last whole shard.

    The index has the part `passages`; the caller holds its lock.

    The same encoder, batch size and device give the same bytes. Another batch size or device may change the last digit;
    neither is part of the plan, so a build that ran out of memory can resume with smaller batches.

    Raises:
        DataError: a vector contains NaN or infinity.
        ConfigError: the device has too little memory.
    """
    plan = _plan(index, encoder, shard_rows)
    manifest = index.sound(plan)
    if manifest is None:
        draft = Draft(index, plan)
        with closing(PassageStore(index.part("passages"))) as store:
            _encode_shards(draft, _numbers(store, shard_rows), store, encoder, progress)
            cut = 0
            for number in _numbers(store, shard_rows):
                cut += int((draft.scratch / _cut(number)).read_bytes())
            if cut:
                progress.note(
                    f"{cut} of {len(store)} passages are longer than {encoder.name} reads "
                    f"({encoder.identity['max_tokens']} tokens); the rest of their text is not searched"
                )
            manifest = draft.finish({"passages": len(store), "dims": encoder.dims, "cut": cut})
    remember_location(index, encoder)
    return manifest


def encode_part(
    index: IndexFolder, encoder: TextEncoder, part: Shard, *, progress: BuildProgress, shard_rows: int = SHARD_ROWS
) -> bool:
    """Encode one of several parts of the passages, while other processes encode others, without the lock.

    Returns:
        Whether the vectors of all parts are there, so that `build_embeddings` has nothing to encode.
    """
    plan = _plan(index, encoder, shard_rows)
    if index.sound(plan) is not None:
        return True
    with index.locked():
        draft = Draft(index, plan, alone=False)
    with closing(PassageStore(index.part("passages"))) as store:
        numbers = _numbers(store, shard_rows)
        own_numbers = [number for number in numbers if number * part.of // len(numbers) == part.number]
        _encode_shards(draft, own_numbers, store, encoder, progress)
    return all(draft.holds(_shard(number)) for number in numbers)


def encoder_of(index: IndexFolder) -> tuple[Mapping[str, str], str]:
    """Return the identity of the encoder of an index's vectors, and its location on this machine ("" if unknown).

    Raises:
        DataError: the index has no vectors.
    """
    manifest = index.manifest("vectors") or index.need("embeddings")
    identity: Mapping[str, str] = manifest.plan.settings["encoder"]
    remembered = read_json(index.path / _LOCATION) or {}
    is_same_encoder = remembered.get("encoder") == identity_checksum(identity)
    return identity, str(remembered.get("location", "")) if is_same_encoder else ""


def remember_location(index: IndexFolder, encoder: TextEncoder) -> None:
    """Keep the encoder's location outside of the parts, which hold nothing about this machine."""
    document = {"encoder": identity_checksum(encoder.identity), "location": encoder.location}
    write_json(index.path / _LOCATION, document, indent=None)


def _plan(index: IndexFolder, encoder: TextEncoder, shard_rows: int) -> Plan:
    made_of = {"passages": index.verify("passages").fingerprint, "encoder": identity_checksum(encoder.identity)}
    settings = {"encoder": dict(encoder.identity), "shard_rows": shard_rows}
    return Plan("embeddings", made_of, settings, {"sentence-transformers": version("sentence-transformers")})


def _numbers(store: PassageStore, shard_rows: int) -> range:
    return range(-(-len(store) // shard_rows))


def _encode_shards(
    draft: Draft, numbers: Sequence[int], store: PassageStore, encoder: TextEncoder, progress: BuildProgress
) -> None:
    """Encode those shards that no process has encoded before."""
    size = int(draft.plan.settings["shard_rows"])
    rows = {number: range(number * size, min((number + 1) * size, len(store))) for number in numbers}
    done = [number for number in numbers if draft.holds(_shard(number))]
    total = sum(map(len, rows.values()))
    progress.start("encoding passages", total=total, unit="passages", done=sum(len(rows[number]) for number in done))
    for number in numbers:
        if number in done:
            continue
        vectors, cut = np.empty((len(rows[number]), encoder.dims), np.float32), 0
        for start in range(rows[number].start, rows[number].stop, _AT_ONCE):
            texts = list(store.contents(start, min(start + _AT_ONCE, rows[number].stop)))
            first = start - rows[number].start
            vectors[first : first + len(texts)] = _encode(encoder, texts, start, store)
            cut += encoder.count_cut(texts)
            progress.advance(len(texts))
        with draft.writing(_cut(number), scratch=True) as file:
            file.write(str(cut).encode())
        with draft.writing(_shard(number)) as file:
            save_array(file, vectors)


def _encode(encoder: TextEncoder, texts: list[str], start: int, store: PassageStore) -> Vectors:
    try:
        vectors: Vectors = encoder.encode_passages(texts)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the device has too little memory for encoder {encoder.name}; run the same build again with a smaller "
            "encoder.batch_size or max_tokens, and it resumes where it stopped"
        ) from error
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1) | ~vectors.any(axis=1))
    if len(broken):
        row = start + int(broken[0])
        raise DataError(
            f"encoder {encoder.name} gives no vector for passage {store.passage(row).id!r} in row {row} (NaN, "
            "infinity or all zero); choose another dtype or encoder, or remove the passage"
        )
    return vectors


def _shard(number: int) -> str:
    return f"shard-{number:05d}.npy"


def _cut(number: int) -> str:
    return f"cut-{number:05d}.txt"
