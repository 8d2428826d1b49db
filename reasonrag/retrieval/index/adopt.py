"""A FAISS index that somebody else built over the same passages, taken over without encoding them."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

from reasonrag.core.errors import DataError
from reasonrag.core.text import one_line
from reasonrag.retrieval.encoders import TextEncoder, identity_checksum
from reasonrag.retrieval.index.embeddings import remember_location
from reasonrag.retrieval.index.faiss_files import INDEX, read_index
from reasonrag.retrieval.index.folder import Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.passages import PassageStore
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.retrieval.index.sample import self_queries
from reasonrag.retrieval.index.tuning import SAMPLE, VectorSearch, tune
from reasonrag.retrieval.index.vector_search import FaissSearch

_CHECKED = 32
_LEAST_FLAT, _LEAST_ROUNDED = 0.99, 0.9
_END = 1 << 20
_RECALL = 0.95


def adopt_vectors(index: IndexFolder, path: Path, encoder: TextEncoder, *, progress: BuildProgress) -> Manifest:
    """Make a FAISS index the part `vectors`: a hard link where it lies on the same disk, else a copy.

    32 passages are encoded and compared with what the index holds in their rows, so that neither another encoder nor
    another order of the passages goes unnoticed. The effort of its searches is tuned against its own widest search:
    there are no embeddings to search exactly.

    Args:
        index: has the part `passages`; locked by the caller.
        path: the file; it must not be changed afterwards.
        encoder: the one that it was built with, prefixes and all.
        progress: told what is done.

    Raises:
        DataError: it cannot be read, or is of other passages, dimensions, distance or encoder.
    """
    passages = index.verify("passages")
    plan = _plan(passages, path, encoder)
    remember_location(index, encoder)
    if made := index.sound(plan):
        return made
    store = PassageStore(index.part("passages"))
    try:
        search = FaissSearch(read_index(path))
        _check_shape(path, search, len(store), encoder)
        _check_vectors(path, search, store, encoder)
        queries = encoder.encode_queries([piece for _, piece in self_queries(store, SAMPLE)])
    finally:
        store.close()
    draft = Draft(index, plan)
    _take(draft, path, progress)
    reference: VectorSearch = _widest(path)
    counts = {"passages": search.rows, "dims": search.dims}
    return draft.finish(counts | tune(search, reference, queries, _RECALL, progress))


def _plan(passages: Manifest, path: Path, encoder: TextEncoder) -> Plan:
    """Told apart by size, beginning and end: the whole file is read when the part is finished, and no sooner."""
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
    """Whether random passages have the vectors that the encoder gives them."""
    import numpy as np

    rows = sorted(random.Random(0).sample(range(len(store)), min(_CHECKED, len(store))))
    wanted = encoder.encode_passages([store.passage(row).contents for row in rows])
    try:
        found = np.stack([search.vector(row) for row in rows])
    except RuntimeError as error:
        raise DataError(
            f"{path} does not give its vectors back ({one_line(str(error))[-200:]}), so they cannot be checked; build "
            "them again"
        ) from error
    cosines = (found * wanted).sum(axis=1) / np.maximum(np.linalg.norm(found, axis=1), 1e-12)
    # The median: a passage that was cut or cleaned otherwise says nothing about the rest.
    cosine, least = float(np.median(cosines)), _LEAST_FLAT if search.exact else _LEAST_ROUNDED
    if not cosine > least:
        raise DataError(
            f"{path} is of another encoder or another order of passages: over {len(rows)} passages the median cosine "
            f"of its vectors with those of {encoder.name} is {cosine:.3f}, not above {least}"
        )


def _take(draft: Draft, path: Path, progress: BuildProgress) -> None:
    if draft.holds(INDEX):
        return
    try:
        os.link(path, draft.folder / INDEX)
    except OSError:  # another disk, or one without hard links
        progress.start("copying the FAISS index", total=None, unit="bytes")
        with path.open("rb") as source, draft.writing(INDEX) as file:
            shutil.copyfileobj(source, file, 1 << 22)


def _widest(path: Path) -> FaissSearch:
    search = FaissSearch(read_index(path))
    search.effort = search.efforts
    return search
