"""`doctor`: what is installed, which backends work on this machine, and what the others need."""

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
    "ray": ("ray",),
}


@click.command()
def doctor() -> None:
    """Print what is installed, which backends work on this machine, and what the others need.

    \b
      reasonrag doctor
    """
    click.echo(
        f"reasonrag {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}\n"
    )
    for extra, packages in _PACKAGES.items():
        versions = ", ".join(f"{name} {_version(name)}" for name in packages)
        click.echo(f"{extra:<6} {versions}")
    click.echo("\nbackends")
    for name, verdict in _backends():
        click.echo(f"  {name:<12} {verdict}")


def _backends() -> Iterator[tuple[str, str]]:
    """Yield the name of each backend with "works" or what it needs."""
    # find_spec imports nothing, so the answer comes at once even if torch is installed.
    local = "works" if find_spec("torch") and find_spec("transformers") else "needs pip install 'reasonrag[train]'"
    yield "extractive", "works: no neural network, for trying a corpus and questions"
    yield "demo", local
    yield "demo-judge", "works: --judge for the demo world, which it knows"
    yield "hf:", local if local != "works" or _gpu() else "works, but on the CPU: use it for small models only"
    yield "vllm:", _vllm()
    key = (
        "OPENAI_API_KEY is set"
        if os.environ.get("OPENAI_API_KEY")
        else "OPENAI_API_KEY is not set: fine for your own server"
    )
    yield "http(s)://", f"works with any OpenAI-compatible server ({key})"


def _vllm() -> str:
    if not find_spec("vllm"):
        return "needs pip install 'reasonrag[vllm]'"
    return "works" if _gpu() else "is installed, but there is no GPU"


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
