from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, chromium
from tests.e2e import product
from tests.e2e.world import World


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the extractive policy over the seafaring world. Read only."""
    folder = tmp_path_factory.mktemp("inspection")
    flags = ("--policy", "extractive", "--iterations", "6", "--out", folder / "run")
    product.build(*World.write(folder).flags, *flags)
    return folder / "run"


@pytest.fixture(scope="session")
def opened() -> Iterator[Browser]:
    """To start one takes longer than most tests of pages."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(opened: Browser) -> Browser:
    """A browser as it is after its start: a window of the usual size, and nothing said or asked for yet."""
    opened.forget()
    opened.view()
    return opened
