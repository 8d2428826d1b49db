"""Adopt a FAISS index that was built elsewhere over the same passages, without encoding them."""

from __future__ import annotations

import hashlib
import os
import random
from contextlib import closing
from pathlib import Path

import numpy as np

from reasonrag.core.errors import DataError
from reasonrag.core.secrets import excerpt
from reasonrag.retrieval.encoders import TextEncoder, identity_checksum
from reasonrag.retrieval.index.embeddings import remember_location
from reasonrag.retrieval.index.faiss_search import INDEX, FaissSearch, read_index
from reasonrag.retrieval.index.folder import BuildProgress, Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.retrieval.index.vector_settings import SAMPLE, self_queries, tune
from reasonrag.storage.files import place

_CHECKED = 32
_LEAST_FLAT, _LEAST_ROUNDED = 0.99, 0.9
_END = 1 << 20
_RECALL = 0.95


def adopt_vectors(index: IndexFolder, path: Path, encoder: TextEncoder, *, progress: BuildProgress) -> Manifest:
    """Make a FAISS index the part `vectors`: a hard link if it is on the same disk, else a copy.

    32 passages are encoded and compared with the vectors in their rows, so that another encoder or another order of the
    passages is noticed. The effort of its searches is tuned against its own widest search, as there are no embeddings
    to search exactly. The caller holds the lock of `index`, which has the part `passages`. The file must not change
    afterwards, and the encoder is the one that it was built with, including its prefixes.

    Raises:
        DataError: the file cannot be read, or has other passages, dimensions, another distance or encoder.
    """
    passages = index.verify("passages")
    plan = _plan(passages, path, encoder)
    remember_location(index, encoder)
    if made := index.sound(plan):
        return made
    with closing(PassageStore(index.part("passages"))) as store:
        search = FaissSearch(read_index(path))
        _check_shape(path, search, len(store), encoder)
        _check_vectors(path, search, store, encoder)
        queries = encoder.encode_queries([piece for _, piece in self_queries(store, SAMPLE)])
    draft = Draft(index, plan)
    if not draft.holds(INDEX):
        progress.start("linking or copying the FAISS index", total=None, unit="bytes")
        place(path, draft.folder / INDEX)
    widest = FaissSearch(read_index(path))
    widest.effort = widest.efforts
    counts = {"passages": search.rows, "dims": search.dims}
    return draft.finish(counts | tune(search, widest, queries, _RECALL, progress))


def _plan(passages: Manifest, path: Path, encoder: TextEncoder) -> Plan:
    """Identify the file by its size, beginning and end: it is read whole only when the part is finished."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_END))
            file.seek(max(size - _END, 0))
            digest.update(file.read())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a FAISS index file") from error
    made_of = {"passages": passages.fingerprint, "encoder": identity_checksum(encoder.identity)}
    settings = {"kind": "adopted", "size": size, "ends": digest.hexdigest(), "encoder": dict(encoder.identity)}
    return Plan("vectors", made_of, settings)


def _check_shape(path: Path, search: FaissSearch, passages: int, encoder: TextEncoder) -> None:
    if search.rows != passages:
        raise DataError(f"{path} holds {search.rows} vectors, and the corpus {passages} passages: it is of another one")
    if search.dims != encoder.dims:
        raise DataError(
            f"{path} holds vectors of {search.dims} dimensions and {encoder.name} makes {encoder.dims}: it was built "
            "with another encoder"
        )
    if not search.by_inner_product:
        raise DataError(f"{path} compares by distance, not by inner product; build the vectors again")


def _check_vectors(path: Path, search: FaissSearch, store: PassageStore, encoder: TextEncoder) -> None:
    """Raise if random passages do not have the vectors that the encoder gives them."""
    rows = sorted(random.Random(0).sample(range(len(store)), min(_CHECKED, len(store))))
    expected = encoder.encode_passages([store.passage(row).contents for row in rows])
    try:
        stored = np.stack([search.vector(row) for row in rows])
    except RuntimeError as error:
        raise DataError(
            f"{path} does not give its vectors back ({excerpt(str(error))}), so they cannot be checked; build "
            "them again"
        ) from error
    cosines = (stored * expected).sum(axis=1) / np.maximum(np.linalg.norm(stored, axis=1), 1e-12)
    # The median, because a single passage may have been cut or cleaned differently.
    cosine, least = float(np.median(cosines)), _LEAST_FLAT if search.exact else _LEAST_ROUNDED
    if not cosine > least:
        raise DataError(
            f"{path} is of another encoder or another order of passages: over {len(rows)} passages the median cosine "
            f"of its vectors with those of {encoder.name} is {cosine:.3f}, not above {least}"
        )
