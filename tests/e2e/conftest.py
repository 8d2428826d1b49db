from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.write(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def finished_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the extractive policy in a new interpreter. Read only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    product.build(*world.flags, "--policy", "extractive", "--iterations", "12", "--seed", "7", "--out", out, fresh=True)
    return out
