from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import finished_run, world  # noqa: F401
from tests.faults.commands import Commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("commands"))
    yield made
    made.close()
