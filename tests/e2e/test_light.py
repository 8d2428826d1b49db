"""Looking at the product imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from docs.reference.commands import commands
from reasonrag.cli import cli
from tests.e2e import product

HEAVY = (
    *("torch", "trl", "datasets", "faiss", "transformers", "vllm", "bm25s", "pyarrow"),
    *("uvicorn", "sentence_transformers", "networkx", "jinja2"),
)
# What the settings models and the display of a run need: not even the help of a command imports these.
MODELS = ("pydantic", "yaml", "rich", "structlog", "aiohttp", "numpy", "asyncio")
HELP_OF_ALL = """
import contextlib, io, json, sys
from reasonrag.cli import cli
helps = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli([*command.split(), "--help"], standalone_mode=False)
    helps[command] = printed.getvalue()
print(json.dumps([helps, list(sys.modules)]))
"""


def python(*arguments: str) -> str:
    """Run a new interpreter and return what it prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=product.environment()).stdout


@pytest.mark.parametrize("code", ["import reasonrag", "from reasonrag.cli import cli; cli(['--version'], 'x', None)"])
def test_nothing_heavy_is_imported(code: str) -> None:
    printed = python("-c", f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}")
    assert "reasonrag" in printed.split() and not set(printed.split()) & set(HEAVY)


def test_a_finished_run_that_is_built_again_prints_its_summary_and_loads_nothing(world, tmp_path) -> None:
    args = ["build-tree", *map(str, world.flags), "--policy", "demo", "--iterations", "2", "--limit", "2"]
    args += ["--out", str(tmp_path / "run"), "--set", "run.max_unreadable=1"]
    first = product.run(*args)
    code = (
        f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); from reasonrag.cli import cli; cli({args})"
    )
    summary, modules = python("-c", code).rstrip().rsplit("\n", 1)
    assert first.returncode == 0 and summary == first.stdout.rstrip() and not set(modules.split()) & {*HEAVY, "numpy"}


def test_help_of_every_command_shows_an_example_and_imports_no_settings_models() -> None:
    names = [" ".join(path) for path, command in commands(cli, ()) if path and not isinstance(command, click.Group)]
    helps, modules = json.loads(python("-c", HELP_OF_ALL, json.dumps(names)))
    for name in names:
        assert any(f"{line.strip()} ".startswith(f"reasonrag {name} ") for line in helps[name].splitlines()), name
    assert not set(modules) & {*HEAVY, *MODELS}


def test_python_without_docstrings_is_refused_in_one_line() -> None:
    command = [sys.executable, "-OO", "-m", "reasonrag", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, env=product.environment())
    assert ran.returncode == 2 and ran.stderr.startswith("error: Python runs with -OO")


def test_help_lists_every_command() -> None:
    printed = product.run("--help", fresh=True).stdout
    assert all(f"  {path[0]} " in printed for path, _ in commands(cli, ()) if path)
