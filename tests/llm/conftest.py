from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.llm.tiny import loaded, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: Path):
    llm = loaded(tiny_model, batch_size=64, device="cpu")
    yield llm
    asyncio.run(llm.aclose())
