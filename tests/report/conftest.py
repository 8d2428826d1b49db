from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.world import World


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the extractive policy over the seafaring world. Read only."""
    folder = tmp_path_factory.mktemp("inspection")
    flags = ("--policy", "extractive", "--iterations", "6", "--out", folder / "run")
    product.build(*World.write(folder).flags, *flags)
    return folder / "run"
