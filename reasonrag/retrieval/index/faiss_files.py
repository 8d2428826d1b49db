"""FAISS indexes on disk: written through a draft, read memory-mapped."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import one_line

INDEX, LISTS = "index.faiss", "lists.ivfdata"

# First bytes of indexes that hold no inverted lists: flat, scalar quantiser, HNSW.
_CODES = (b"IxFI", b"IxF2", b"IxFl", b"IxSQ", b"IHNf", b"IHNs")


def load_faiss() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("faiss") is None:
        raise ConfigError("dense search needs faiss, which is not installed; pip install 'reasonrag[dense]'")
    return import_module("faiss")


def write_index(index: Any, file: IO[bytes]) -> None:
    """Write an index to an open file."""
    faiss = load_faiss()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def read_index(path: Path) -> Any:
    """Open an index so that its vectors and lists stay on disk until they are looked at.

    Raises:
        DataError: it is no FAISS index.
    """
    faiss = load_faiss()
    try:
        if (path.parent / LISTS).exists():
            return _with_lists(faiss, path)
        with path.open("rb") as file:
            kind = file.read(4)
        # Each flag maps one sort of index and reads all others into memory.
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if kind in _CODES else faiss.IO_FLAG_MMAP)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path} cannot be read as a FAISS index ({one_line(str(error))[-200:]})") from error


def on_gpus(index: Any) -> Any:
    """A copy of an index, shared out over all GPUs. Search it from one thread only: GPU resources are not locked.

    Raises:
        ConfigError: this faiss has no GPU support, there is no GPU, or this kind of index cannot be there.
    """
    faiss = load_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        raise ConfigError("the installed faiss has no GPU support; pip install 'reasonrag[gpu]', or leave out gpu")
    if faiss.get_num_gpus() == 0:
        raise ConfigError("no GPU is visible to faiss; leave out gpu")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise ConfigError(
            f"vectors of kind {type(index).__name__} cannot be on GPUs ({one_line(str(error))[-200:]}); build flat or "
            "ivf ones, or leave out gpu"
        ) from error


def _with_lists(faiss: Any, path: Path) -> Any:
    """An inverted file whose lists lie in a file beside it.

    IO_FLAG_ONDISK_SAME_DIR would do this as well, but writes a line to standard output; and IO_FLAG_MMAP leaves such
    lists unmapped, so that the first search ends the process.
    """
    index = faiss.read_index(str(path), faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY)
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.filename = str(path.parent / LISTS)
    lists.do_mmap()
    return index
