"""`verify` without a path: installed versions, models that work on this machine, and the requirements of the others."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import click

from reasonrag import __version__

_PACKAGES = {
    "core": ("aiohttp", "bm25s", "datasets", "pyarrow", "pydantic"),
    "train": ("torch", "transformers", "trl", "peft", "accelerate"),
    "dense": ("faiss-cpu", "sentence-transformers"),
    "serve": ("uvicorn", "prometheus-client"),
    "gpu": ("faiss-gpu",),
    "vllm": ("vllm",),
}


def print_installation() -> None:
    """Print versions and backends."""
    system = f"{platform.system()} {platform.machine()}"
    click.echo(f"reasonrag {__version__}, Python {platform.python_version()}, {system}\n")
    for extra, packages in _PACKAGES.items():
        click.echo(f"{extra:<6} {', '.join(f'{name} {_version(name)}' for name in packages)}")
    click.echo("\nbackends")
    for name, verdict in _backends():
        click.echo(f"  {name:<12} {verdict}")


def _backends() -> Iterator[tuple[str, str]]:
    """Yield the name of each backend with "works" or what it needs."""
    # find_spec imports nothing, so the answer comes at once even if torch is installed.
    has_torch = find_spec("torch") and find_spec("transformers")
    local = "works" if has_torch else "needs pip install 'reasonrag[train]'"
    yield "extractive", "works: no neural network, for trying a corpus and questions"
    yield "demo", local
    yield "demo-judge", "works: --judge for the demo world, which it knows"
    yield "hf:", local if not has_torch or _gpu() else "works, but on the CPU: use it for small models only"
    if find_spec("vllm"):
        yield "vllm:", "works" if _gpu() else "is installed, but there is no GPU"
    else:
        yield "vllm:", "needs pip install 'reasonrag[vllm]'"
    key = "is set" if os.environ.get("OPENAI_API_KEY") else "is not set: fine for your own server"
    yield "http(s)://", f"works with any OpenAI-compatible server (OPENAI_API_KEY {key})"


def _gpu() -> bool:
    from reasonrag.pipeline.models import has_gpu

    try:
        return has_gpu()
    # A broken torch installation may raise anything on import, and a diagnosis has to survive it.
    except Exception:
        return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
