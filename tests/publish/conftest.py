"""A Hub on 127.0.0.1 and a client that speaks to it."""

from __future__ import annotations

from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.fakes.hub import serving_hub
from tests.fakes.hub_state import TOKEN, FakeHub


@pytest.fixture(scope="module")
def hub_server() -> Iterator[FakeHub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def hub(hub_server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The Hub without faults, reachable by clients of this process, whose retries do not wait."""
    # The client reads these from the environment when it is first imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    hub_server.clear()
    hub_server.blobs.clear()  # or the same bytes would not be sent again
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return hub_server


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)
