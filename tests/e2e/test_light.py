"""A person who only wants to look pays for nothing heavy."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.e2e import product

HEAVY = (
    *("torch", "trl", "datasets", "faiss", "transformers", "vllm", "bm25s", "pyarrow"),
    *("uvicorn", "sentence_transformers", "networkx", "jinja2"),
)
# What the settings models and the display of a run need: not even the help of a command that has them imports these.
MODELS = ("pydantic", "yaml", "rich", "structlog", "aiohttp", "numpy", "asyncio")
COMMANDS = (
    *("build-tree", "pairs"),
    *("index", "index build", "index serve", "index doctor", "index recall"),
    *("report", "show", "verify", "export", "import", "publish", "eval"),
    *(
        "dpo",
        "dpo train",
        "sft",
        "sft train",
        "rl",
        "rl train",
        "rl plan",
    ),
)


def imported(*command: str) -> tuple[set[str], str]:
    """Top-level packages that a Python command imports, by `-X importtime`, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        check=True,
        env=product.environment(),
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import reasonrag"),
        (product.REASONRAG, "--help"),
        (product.REASONRAG, "build-tree", "--help"),
        (product.REASONRAG, "--version"),
    ],
)
def test_nothing_heavy_is_imported(command: tuple[str, ...]) -> None:
    found, _ = imported(*command)
    assert "reasonrag" in found
    assert not found & set(HEAVY)


def test_help_comes_at_once() -> None:
    """By the seconds of a core that it takes: those on the wall are the machine's, which has other things to do."""
    took = []
    for _ in range(3):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert product.run("--help", fresh=True).returncode == 0
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
    print(f"reasonrag --help: {min(took):.2f} s at best of three")
    assert min(took) < 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_an_example_and_imports_no_settings_models(command: str) -> None:
    found, printed = imported(product.REASONRAG, *command.split(), "--help")
    assert any(f"{line.strip()} ".startswith(f"reasonrag {command} ") for line in printed.splitlines())
    assert not found & {*HEAVY, *MODELS}


def test_help_lists_every_command() -> None:
    done = product.run("--help", fresh=True)
    assert all(f"  {command.partition(' ')[0]} " in done.stdout for command in COMMANDS)
