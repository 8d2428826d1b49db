from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

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


def test_every_extra_has_a_pinned_version_that_it_allows():
    """`pip install -c constraints.txt reasonrag[EXTRA]` installs what was tested; vllm has a file for itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, requirements in extras.items():
        file = ROOT / ("constraints-vllm.txt" if extra == "vllm" else "constraints.txt")
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        pins = {line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2] for line in lines}
        for text in requirements:
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            assert requirement.specifier or name.startswith("types-"), f"[{extra}] {text} has no bound"
            assert requirement.specifier.contains(pins[name]), f"[{extra}] {text} is not met by {file.name}"


def test_every_upper_bound_has_a_reason():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert not [line for line in lines if re.match(r'    "[\w-]+>=[\d.]+,<', line) and "#" not in line]
