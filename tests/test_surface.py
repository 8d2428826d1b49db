"""`import reasonrag` is light, and its surface is what the documentation says."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reasonrag
from tests.e2e import product


def test_every_name_of_the_surface_is_there_documented_and_typed():
    lines = Path(reasonrag.__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    for name in reasonrag.__all__:
        value = getattr(reasonrag, name)
        assert name.startswith("__") or isinstance(value, dict) or value.__doc__, name
        assert name.startswith("__") or any(re.search(rf"import {name} as {name}$", line) for line in lines), name


def test_help_shows_the_surface():
    text = pydoc.plain(pydoc.render_doc(reasonrag))
    for name in ("build_trees", "class Engine", "class Retriever", "class Reward", "token_f1", "docs/extend.md"):
        assert name in text


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Enginee'"):
        _ = reasonrag.Enginee


def test_importing_the_package_imports_nothing_else():
    code = "import sys; import reasonrag; print([name for name in sys.modules if name.startswith('reasonrag.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_shell_completes_commands_and_flags():
    for words, completed in (("reasonrag build-", "build-tree"), ("reasonrag dpo train --epo", "--epochs")):
        typed = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = product.run(fresh=True, _REASONRAG_COMPLETE="bash_complete", **typed)
        assert (done.stdout, done.stderr) == (f"plain,{completed}\n", "")
