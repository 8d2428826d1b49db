from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_everything_that_is_not_code_is_declared_as_package_data():
    """An editable install reads files from the checkout; a wheel holds what is declared, and nothing else."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path
        for package, patterns in declared.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    there = {
        path
        for path in (ROOT / "reasonrag").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert there == {path for path in shipped if path.is_file()} != set()
