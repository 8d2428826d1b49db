"""A FAISS index over an index's embeddings: built, tuned against exact search, and searched where it lies on disk."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import DataError
from reasonrag.retrieval.index.embeddings import Embeddings
from reasonrag.retrieval.index.exact import ExactSearch
from reasonrag.retrieval.index.faiss_files import INDEX, load_faiss, on_gpus, read_index
from reasonrag.retrieval.index.folder import Draft, IndexFolder, Manifest, Plan
from reasonrag.retrieval.index.progress import BuildProgress
from reasonrag.retrieval.index.tuning import SAMPLE, VectorSearch, tune
from reasonrag.retrieval.index.vector_build import build_graph, build_inverted_file
from reasonrag.retrieval.index.vector_search import FaissSearch
from reasonrag.retrieval.index.vector_settings import VectorSettings, memory, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]


def build_vectors(
    index: IndexFolder,
    settings: VectorSettings,
    *,
    max_bytes: int,
    queries: Vectors | None = None,
    progress: BuildProgress,
) -> Manifest | None:
    """Build the part `vectors` over the embeddings, or take it away where search is exact; a killed build goes on.

    Args:
        index: has the part `embeddings`; locked by the caller.
        settings: of `choose`.
        max_bytes: what it may take, for the message alone: `choose` has kept to it.
        queries: `[n, dims]` that the effort of a search is tuned with; the passages' own vectors if None, which makes
            it look easier than it is.
        progress: told in vectors, and what was chosen.

    Returns:
        None where search is exact.
    """
    embeddings = Embeddings.open(index)
    progress.note(f"vectors: {settings.kind}; {shown(memory(embeddings.rows, embeddings.dims, max_bytes), max_bytes)}")
    if settings.kind == "flat":
        index.remove("vectors")
        return None
    asked = _sample(embeddings) if queries is None else queries
    plan = vectors_plan(index.need("embeddings"), settings, asked)
    if made := index.sound(plan):
        return made
    draft = Draft(index, plan)
    (build_graph if settings.kind == "hnsw" else build_inverted_file)(draft, embeddings, settings, progress)
    search = FaissSearch(read_index(draft.folder / INDEX), embeddings=embeddings, refine=settings.refine)
    counts = {"passages": embeddings.rows, "dims": embeddings.dims}
    return draft.finish(counts | tune(search, ExactSearch(embeddings), asked, settings.recall, progress))


def vectors_plan(embeddings: Manifest, settings: VectorSettings, queries: Vectors) -> Plan:
    """What decides the vectors' bytes and how hard a search looks."""
    made_of = {
        "passages": embeddings.plan.made_of["passages"],
        "embeddings": embeddings.fingerprint,
        "queries": hashlib.sha256(queries.tobytes()).hexdigest(),
    }
    kept = {"encoder": embeddings.plan.settings["encoder"], **asdict(settings)}
    return Plan("vectors", made_of, kept, {"faiss": _faiss_version()})


def open_vectors(index: IndexFolder, *, gpu: bool = False) -> VectorSearch:
    """The search over an index's vectors: FAISS's if it has the part `vectors`, else exact over its embeddings.

    Args:
        index: has `vectors`, `embeddings` or both.
        gpu: copy the vectors to all GPUs and search there.

    Raises:
        DataError: there is neither, or a file is missing or damaged.
        ConfigError: faiss is missing, or cannot do it on GPUs.
    """
    if index.manifest("vectors") is None:
        embeddings = Embeddings.open(index)
        return FaissSearch(on_gpus(_flat(embeddings))) if gpu else ExactSearch(embeddings)
    manifest = index.verify("vectors")
    refine = int(manifest.plan.settings.get("refine", 1))
    found = Embeddings.open(index) if refine > 1 else None
    search = FaissSearch(read_index(index.part("vectors") / INDEX), embeddings=found, refine=refine)
    if search.rows != manifest.counts["passages"]:
        raise DataError(f"index {index.path}: vectors/{INDEX} holds {search.rows} vectors, not what its manifest says")
    if search.efforts and "effort" in manifest.counts:
        search.effort = manifest.counts["effort"]
    if gpu:
        search.to_gpus()
    return search


def _sample(embeddings: Embeddings) -> Vectors:
    import numpy as np

    rows = np.linspace(0, embeddings.rows, min(SAMPLE, embeddings.rows), endpoint=False).astype(np.int64)
    return embeddings.take(rows)


def _flat(embeddings: Embeddings) -> Any:
    index = load_faiss().IndexFlatIP(embeddings.dims)
    for _, shard in embeddings.blocks():
        index.add(shard)
    return index


def _faiss_version() -> str:
    for name in ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu-cu11", "faiss-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(load_faiss().__version__)
