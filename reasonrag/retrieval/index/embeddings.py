"""The vectors of all passages, in shards: encoded once, whatever they are searched with later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.encoders import TextEncoder, identity_checksum
from reasonrag.retrieval.index.folder import Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.storage.files import read_json, write_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

SHARD_ROWS = 8192  # the most work that a kill can cost
_AT_ONCE = 1024  # passages that the encoder sorts by length and encodes between two signs of life
_LOCATION = ".encoder.json"


class Embeddings:
    """`[rows, dims]` float32 vectors of length 1 by row of `passages`, memory-mapped."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Map the finished part `embeddings` in `folder`."""
        import numpy as np

        self.rows, self.dims = manifest.counts["passages"], manifest.counts["dims"]
        self.shard_rows = int(manifest.plan.settings["shard_rows"])
        names = [_shard(number) for number in range(-(-self.rows // self.shard_rows))]
        # Slices of np.memmap cost ten times as much as slices of the plain array over the same mapping.
        self._shards: list[Vectors] = [np.asarray(np.load(folder / name, mmap_mode="r")) for name in names]

    @classmethod
    def open(cls, index: IndexFolder) -> Embeddings:
        """Those of an index, checked.

        Raises:
            DataError: there are none, or a file is missing or damaged.
        """
        return cls(index.part("embeddings"), index.verify("embeddings"))

    def block(self, start: int, stop: int) -> Vectors:
        """`[stop - start, dims]`; a copy only where it spans several shards."""
        import numpy as np

        first, last = start // self.shard_rows, max(stop - 1, start) // self.shard_rows
        spans = [self._shards[n][max(start - n * self.shard_rows, 0) : stop - n * self.shard_rows]
                 for n in range(first, last + 1)]  # fmt: skip
        return spans[0] if len(spans) == 1 else np.concatenate(spans)

    def blocks(self) -> Iterator[tuple[int, Vectors]]:
        """First row and vectors of every shard, in order."""
        for number, shard in enumerate(self._shards):
            yield number * self.shard_rows, shard

    def take(self, rows: NDArray[np.int64]) -> Vectors:
        """`[n, dims]` vectors of any rows, 0 <= row < rows."""
        import numpy as np

        found = np.empty((len(rows), self.dims), np.float32)
        shards, places = np.divmod(rows, self.shard_rows)
        for number in np.unique(shards):
            mask = shards == number
            found[mask] = self._shards[number][places[mask]]
        return found


def build_embeddings(
    index: IndexFolder, encoder: TextEncoder, *, progress: BuildProgress, shard_rows: int = SHARD_ROWS
) -> Manifest:
    """Encode every passage; a killed build goes on behind the last whole shard.

    The same encoder, batch size and device give the same bytes. Others may differ in the last digit, so they are not
    part of the plan, and a build that ran out of memory may go on with smaller ones.

    Args:
        index: has the part `passages`; locked by the caller.
        encoder: of passages and, later, of queries.
        progress: told in passages.
        shard_rows: vectors in a file.

    Raises:
        DataError: a vector holds NaN or infinity.
        ConfigError: the device has too little memory.
    """
    plan = embeddings_plan(index.verify("passages"), encoder, shard_rows)
    made = index.sound(plan)
    if made is None:
        store = PassageStore(index.part("passages"))
        try:
            made = _build(Draft(index, plan), store, encoder, shard_rows, progress)
        finally:
            store.close()
    remember_location(index, encoder)
    return made


def embeddings_plan(passages: Manifest, encoder: TextEncoder, shard_rows: int = SHARD_ROWS) -> Plan:
    """What decides the vectors of these passages."""
    made_of = {"passages": passages.fingerprint, "encoder": identity_checksum(encoder.identity)}
    settings = {"encoder": dict(encoder.identity), "shard_rows": shard_rows}
    return Plan("embeddings", made_of, settings, {"sentence-transformers": version("sentence-transformers")})


def encoder_of(index: IndexFolder) -> tuple[Mapping[str, str], str]:
    """Identity of the encoder that an index's vectors are of, and where it lay on this machine ("" if not known).

    Raises:
        DataError: the index has no vectors.
    """
    made = index.manifest("vectors") or index.need("embeddings")
    identity: Mapping[str, str] = made.plan.settings["encoder"]
    kept = read_json(index.path / _LOCATION) or {}
    is_same_encoder = kept.get("encoder") == identity_checksum(identity)
    return identity, str(kept.get("location", "")) if is_same_encoder else ""


def remember_location(index: IndexFolder, encoder: TextEncoder) -> None:
    """Keep where the encoder lies beside the parts: a part says nothing about this machine."""
    document = {"encoder": identity_checksum(encoder.identity), "location": encoder.location}
    write_json(index.path / _LOCATION, document, indent=None)


def _build(
    draft: Draft, store: PassageStore, encoder: TextEncoder, shard_rows: int, progress: BuildProgress
) -> Manifest:
    rows = len(store)
    numbers = range(-(-rows // shard_rows))
    done = [number for number in numbers if draft.holds(_shard(number))]
    behind = sum(min(shard_rows, rows - number * shard_rows) for number in done)
    progress.start("encoding passages", total=rows, unit="passages", done=behind)
    for number in numbers:
        if number not in done:
            start = number * shard_rows
            _write_shard(draft, number, range(start, min(start + shard_rows, rows)), store, encoder, progress)
    cut = sum(int((draft.scratch / _cut(number)).read_bytes()) for number in numbers)
    if cut:
        progress.note(
            f"{cut} of {rows} passages are longer than {encoder.name} reads ({encoder.identity['max_tokens']} tokens); "
            "what stands behind that is not searched"
        )
    return draft.finish({"passages": rows, "dims": encoder.dims, "cut": cut})


def _write_shard(
    draft: Draft, number: int, rows: range, store: PassageStore, encoder: TextEncoder, progress: BuildProgress
) -> None:
    import numpy as np

    vectors, cut = np.empty((len(rows), encoder.dims), np.float32), 0
    for start in range(rows.start, rows.stop, _AT_ONCE):
        texts = list(store.contents(start, min(start + _AT_ONCE, rows.stop)))
        found = _encode(encoder, texts)
        broken = np.flatnonzero(~np.isfinite(found).all(axis=1) | ~found.any(axis=1))
        if len(broken):
            row = start + int(broken[0])
            raise DataError(
                f"encoder {encoder.name} gives no vector for passage {store.passage(row).id!r} in row {row} (NaN, "
                "infinity or all zero); take another dtype or encoder, or leave the passage out"
            )
        vectors[start - rows.start : start - rows.start + len(texts)] = found
        cut += encoder.count_cut(texts)
        progress.advance(len(texts))
    with draft.writing(_cut(number), scratch=True) as file:
        file.write(str(cut).encode())
    with draft.writing(_shard(number)) as file:
        np.lib.format.write_array(file, vectors, allow_pickle=False)


def _encode(encoder: TextEncoder, texts: list[str]) -> Vectors:
    try:
        return encoder.encode_passages(texts)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        if "out of memory" not in str(error):
            raise
        raise ConfigError(
            f"the device has too little memory for encoder {encoder.name}; run the same build again with a smaller "
            "encoder.batch_size or max_tokens, it goes on where it stopped"
        ) from error


def _shard(number: int) -> str:
    return f"shard-{number:05d}.npy"


def _cut(number: int) -> str:
    return f"cut-{number:05d}.txt"
