"""A push: files, pause, load, reset of the prefix cache, resume, and what each of them leaves behind where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.llm.weight_sync import VLLMServerSync, write_weights
from tests import warmed
from tests.serving import HttpServer

RESET = "reset_prefix_cache?reset_running_requests=true"
WHOLE = ["pause?mode=wait", "collective_rpc", RESET, "resume"]


class FakeVLLM(HttpServer):
    """The control endpoints of a vLLM server on loopback.

    Attributes:
        calls: control requests, in order.
        faults: by path, the replies before the good ones: a status, or "drop" for a closed connection.
        weights: what it has loaded, from the files that it was told of.
        paused: whether generation is.
    """

    def __init__(self, **faults: list[int | str]) -> None:
        self.calls: list[str] = []
        self.faults = faults
        self.weights: dict[str, Any] = {}
        self.paused = False
        super().__init__()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/{name}", self._control)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.calls.append(str(request.rel_url).removeprefix("/"))
        fault = next(iter(self.faults.get(name, [])), None)
        if fault is not None:
            self.faults[name].pop(0)
        if fault == "drop":
            assert request.transport is not None
            request.transport.close()
        if isinstance(fault, int):
            return web.json_response({"error": "no"}, status=fault)
        if name == "pause":
            self.paused = True
        elif name == "collective_rpc":
            asked = await request.json()
            assert self.paused and asked["method"] == "reload_weights"
            self.weights = loaded(Path(asked["kwargs"]["weights_path"]))
        elif name == "resume":
            self.paused = False
        elif name == "reset_prefix_cache":
            return web.json_response({"success": fault != "kept"})
        return web.json_response({})


def loaded(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., VLLMServerSync]:
    def open_(server: FakeVLLM, **options: Any) -> VLLMServerSync:
        folder = tmp_path / "weights"
        return VLLMServerSync(f"{server.url}/v1", folder, backoff_s=0.01, pause_timeout_s=5.0, **options)

    return open_


def weights(push: int) -> list[tuple[str, Any]]:
    import torch

    return [("v", torch.tensor(-push)), ("w", torch.tensor(push))]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


def test_a_push_pauses_loads_resets_the_cache_and_resumes(server: FakeVLLM, opened: Any, tmp_path: Path):
    sync = opened(server)
    sync.push(weights(1))
    assert server.calls == WHOLE
    assert (server.weights, server.paused) == ({"v": -1, "w": 1}, False)
    sync.close()
    assert not list(tmp_path.iterdir())


def test_a_server_on_the_same_card_wakes_for_the_weights_before_it_has_room_for_text(server: FakeVLLM, opened: Any):
    sync = opened(server, sleeps=True)
    sync.push(weights(1))
    sync.sleep()
    pause, load, reset, resume = WHOLE
    wakes = ["wake_up?tags=weights", load, "wake_up?tags=kv_cache"]
    assert server.calls == [pause, *wakes, reset, resume, "sleep?level=2&mode=wait"]


def failing(after: int = 1) -> Iterator[tuple[str, Any]]:
    yield from weights(9)[:after]
    raise MemoryError("no room for the next tensor")


def test_weights_that_cannot_be_written_do_not_reach_the_server(server: FakeVLLM, opened: Any):
    sync = opened(server)
    sync.push(weights(1))
    with pytest.raises(LLMError, match=r"cannot be written into .*: no room for the next tensor") as caught:
        sync.push(failing())
    assert caught.value.cause == "weight_sync"
    assert (server.paused, server.calls) == (False, WHOLE)


def test_a_load_that_fails_leaves_the_server_paused_until_the_next_whole_push(server: FakeVLLM, opened: Any):
    server.faults.update(collective_rpc=[400])
    sync = opened(server)
    with pytest.raises(LLMError, match=r"HTTP 400.*stays paused"):
        sync.push(weights(1))
    assert (server.paused, server.calls[-1]) == (True, "collective_rpc")
    sync.push(weights(2))
    assert (server.paused, server.weights["w"]) == (False, 2)


@pytest.mark.parametrize("fault", ["kept", 409], ids=["success: false", "refused"])
def test_a_cache_that_is_not_reset_fails_the_push(server: FakeVLLM, opened: Any, fault: int | str):
    server.faults.update(reset_prefix_cache=[fault])
    sync = opened(server)
    with pytest.raises(LLMError, match="stays paused"):
        sync.push(weights(1))
    assert server.paused


def test_a_server_that_cannot_be_paused_keeps_its_weights(server: FakeVLLM, opened: Any):
    sync = opened(server)
    sync.push(weights(1))
    server.faults["pause"] = [400]
    with pytest.raises(LLMError, match="cannot be paused"):
        sync.push(weights(2))
    assert server.weights["w"] == 1


@pytest.mark.parametrize(("name", "fault"), [("pause", 503), ("reset_prefix_cache", "drop"), ("resume", 503)])
def test_a_hiccup_of_a_control_request_is_overcome(server: FakeVLLM, opened: Any, name: str, fault: int | str):
    server.faults.update(**{name: [fault]})
    sync = opened(server)
    sync.push(weights(1))
    assert (server.paused, server.weights["w"]) == (False, 1)


def test_a_server_without_the_endpoints_is_told_how_to_start(server: FakeVLLM, opened: Any):
    server.faults.update(pause=[404])
    sync = opened(server)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        sync.push(weights(1))


def test_tensors_fill_files_and_replace_those_of_the_push_before(tmp_path: Path):
    import torch

    folder = tmp_path / "weights"
    tensors = {name: torch.full((2, 3), float(n)) for n, name in enumerate("abcd")}
    tensors["b"] = torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2).T
    write_weights(folder, tensors.items(), file_bytes=50)
    assert [sorted(loaded_by) for loaded_by in map(names, sorted(folder.iterdir()))] == [["a", "b"], ["c", "d"]]
    assert all(torch.equal(loaded(folder)[name], tensor) for name, tensor in tensors.items())
    write_weights(folder, [("a", tensors["a"])], file_bytes=50)
    assert loaded(folder).keys() == {"a"}


def names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _one_of_two(rank: int, folder: str, url: str, said: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sync, seen, message = VLLMServerSync(url, Path(folder) / "weights", backoff_s=0.01), [], ""

    def tensors() -> Iterator[tuple[str, Any]]:
        for tensor in weights(1):
            seen.append(tensor)
            yield tensor

    sync.push(tensors())
    try:
        sync.push(tensors())
    except LLMError as error:
        message = str(error)
    said.put((rank, len(seen), message))
    dist.destroy_process_group()


@pytest.mark.slow
def test_of_two_processes_one_pushes_and_both_know_how_it_went(tmp_path: Path):
    warm = warmed.context()
    said = warm.Queue()
    with FakeVLLM(collective_rpc=["good", 400]) as server:
        group = [warm.Process(target=_one_of_two, args=(rank, str(tmp_path), server.url, said)) for rank in range(2)]
        for process in group:
            process.start()
        results = sorted(said.get(timeout=60) for _ in group)
        for process in group:
            process.join(10)
        pauses = [call for call in server.calls if call.startswith("pause")]
    assert len(pauses) == 2
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(2)]
    assert all("HTTP 400" in message for *_, message in results)
